"""How many bytes a store holds, for whom, and which objects no checkpoint needs.

A usage is one listing of the store's prefix. The keys of a job arrive in the order manifests, references,
shards, so that the objects of one checkpoint are judged when the last of them was listed. Memory grows with
the number of jobs, and with the checkpoints of one job, but not with ranks or bytes. No shard is read.

An orphan is an object that no manifest names and that no existing checkpoint needs, and that is an hour old,
so that it probably belongs to no upload under way. That is what users are shown. What may be deleted is
narrower (`rules.abandoned`): an upload may take days.
"""

from __future__ import annotations

import heapq
import json
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from itertools import groupby

from holdfast_core.contract import MAX_LISTED_JOBS, MAX_LISTED_NAMESPACES
from holdfast_core.errors import CorruptionError, FormatError, NotFoundError
from holdfast_core.format import keys
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, JobUid, Rank
from holdfast_core.store.rules import QUIET, STALE_UPLOADS, abandoned
from holdfast_core.store.tier import Dead, ObjectTier, Total
from holdfast_core.tiers.objects import Listed

logger = logging.getLogger(__name__)

_REPORT_BYTES = 4000
"""A termination message has at most 4096 bytes."""
_MAX_UNNAMED = 1000


class Orphan(StrEnum):
    """Kinds of objects that no checkpoint needs."""

    SHARDS = "shards"
    LAYOUTS = "layouts"
    MARKERS = "markers"
    UPLOADS = "uploads"
    """Multipart uploads, or temporary files, that were begun an hour ago or earlier and have not ended."""


@dataclass(frozen=True, slots=True, order=True)
class StoredJobName:
    """A job as the keys of its objects name it."""

    namespace: str
    job_uid: JobUid


@dataclass(slots=True)
class JobUsage:
    """What one job has in the store."""

    total: Total = field(default_factory=Total)
    checkpoints: int = 0
    """Number of manifests."""
    oldest_orphan: timedelta | None = None
    """Age of the oldest orphan. None: there is none."""
    unnamed: list[Listed] = field(default_factory=list)
    """Orphans beside the shards that a manifest names, at most _MAX_UNNAMED."""


@dataclass(slots=True)
class StoreUsage:
    """What a store holds. All ages are by the store's clock."""

    total: Total = field(default_factory=Total)
    """All objects below the prefix, also those that Holdfast did not write."""
    jobs: dict[StoredJobName, JobUsage] = field(default_factory=dict)
    orphans: dict[Orphan, Total] = field(default_factory=lambda: {kind: Total() for kind in Orphan})
    swept: Total = field(default_factory=Total)
    """What was deleted before this listing."""
    seconds: float = 0.0

    def namespaces(self) -> dict[str, Total]:
        """Return the totals of each namespace."""
        found = dict[str, Total]()
        for name, job in self.jobs.items():
            found.setdefault(name.namespace, Total()).add_all(job.total)
        return found

    def to_json(self) -> str:
        """Return the usage as one line of ASCII JSON that fits into a termination message.

        Of jobs and namespaces it has the largest ones.
        """
        jobs = _rows(
            (((name.namespace, name.job_uid), job.total) for name, job in self.jobs.items()),
            MAX_LISTED_JOBS,
        )
        namespaces = _rows(
            (((name,), total) for name, total in self.namespaces().items()), MAX_LISTED_NAMESPACES
        )
        while True:
            text = json.dumps(
                {
                    "bytes": self.total.size_bytes,
                    "objects": self.total.objects,
                    "checkpoints": sum(job.checkpoints for job in self.jobs.values()),
                    "jobCount": len(self.jobs),
                    "seconds": round(self.seconds, 3),
                    "orphans": {
                        str(kind): {
                            "objects": total.objects,
                            "bytes": total.size_bytes,
                            "oldestSeconds": int(total.oldest.total_seconds()),
                        }
                        for kind, total in self.orphans.items()
                    },
                    "swept": {"objects": self.swept.objects, "bytes": self.swept.size_bytes},
                    "namespaces": namespaces,
                    "jobs": jobs,
                },
                separators=(",", ":"),
            )
            if len(text) <= _REPORT_BYTES:
                return text
            (jobs if len(jobs) > len(namespaces) else namespaces).pop()


def _rows(totals: Iterable[tuple[Sequence[str], Total]], limit: int) -> list[list[str | int]]:
    """Return the names, bytes and objects of the largest totals."""
    largest = heapq.nsmallest(limit, totals, key=lambda found: (-found[1].size_bytes, found[0]))
    return [[*name, total.size_bytes, total.objects] for name, total in largest]


def usage_of(tier: ObjectTier, quiet: timedelta = QUIET) -> StoreUsage:
    """List the store. Raises what the store raises.

    Args:
        tier: The store.
        quiet: Age from which an object that no checkpoint needs counts as an orphan.
    """
    usage, begun = StoreUsage(), time.monotonic()
    for name, items in groupby(tier.all_jobs.list(""), lambda item: _job_of(item.key)):
        if name is None:  # a job's prefix is one run of keys, those of others may come again
            for item in items:
                usage.total.add(item)
            continue
        scan = _JobScan(tier, name, usage, quiet)
        scan.run(items)
        if scan.is_ours:
            usage.jobs[name] = scan.job
        usage.total.add_all(scan.job.total)
    for item in tier.all_jobs.unfinished():
        if item.age >= quiet:
            usage.orphans[Orphan.UPLOADS].add(item)
    usage.seconds = time.monotonic() - begun
    return usage


def sweep(
    tier: ObjectTier,
    usage: StoreUsage,
    grace: timedelta,
    *,
    running: Collection[JobUid] = (),
    ended: Collection[JobUid] = (),
) -> StoreUsage:
    """Delete the orphans that are older than the grace, and return the usage of the store after that.

    docs/object-store.md states the rule, and ADR 0023 says why no interleaving with an upload, a prune or a
    restore loses a byte. It may be called again at any time, also by several processes at once.

    Args:
        tier: The store.
        usage: A listing of the store, which names the jobs that have orphans.
        grace: Minimum age. At least QUIET, for uploads that a fenced coordinator is just ending.
        running: Jobs with a coordinator, which sweeps what is theirs and knows what it uploads.
        ended: Jobs that upload nothing more.
    """
    swept = Total()
    for name, job in usage.jobs.items():
        if job.oldest_orphan is None or job.oldest_orphan < grace or name.job_uid in running:
            continue
        swept.add_all(_sweep_job(tier, name, grace, ended=name.job_uid in ended))
        # A manifest is never replaced, so no checkpoint will name these objects.
        unnamed = [item for item in job.unnamed if item.age >= grace]
        tier.all_jobs.delete(item.key for item in unnamed)
        for item in unnamed:
            swept.add(item)
    uploads = usage.orphans[Orphan.UPLOADS]
    aborted = 0
    if uploads.objects and uploads.oldest >= max(grace, STALE_UPLOADS):
        aborted = tier.all_jobs.abort_stale(max(grace, STALE_UPLOADS))
    if not swept.objects and not aborted:
        return usage
    after = usage_of(tier, min(grace, QUIET))
    after.swept = swept
    after.swept.objects += aborted
    return after


def _sweep_job(tier: ObjectTier, name: StoredJobName, grace: timedelta, *, ended: bool) -> Total:
    def judge() -> Dead:
        return lambda checkpoints, manifests: abandoned(checkpoints, manifests, ended=ended)

    found = Total()
    for total in tier.job(name.namespace, name.job_uid).sweep(grace, judge).values():
        found.add_all(total)
    return found


def _job_of(key: str) -> StoredJobName | None:
    """Return the job to which an object belongs by its key, or None."""
    parts = key.split("/", 2)
    if len(parts) < 3:
        return None
    try:
        keys.job_prefix(parts[0], JobUid(parts[1]))
    except FormatError:
        return None
    return StoredJobName(parts[0], JobUid(parts[1]))


class _JobScan:
    """Judges the objects of one job while they are listed."""

    def __init__(
        self, tier: ObjectTier, name: StoredJobName, usage: StoreUsage, quiet: timedelta
    ) -> None:
        self._tier = tier
        self._quiet = quiet
        self._name = name
        self._usage = usage
        self.job = JobUsage()
        self.is_ours = False
        """Whether Holdfast has written any of the objects."""
        self._manifests: set[CheckpointId] = set()
        self._needed: set[CheckpointId] = set()
        """Checkpoints that an existing one needs."""

    def run(self, items: Iterable[Listed]) -> None:
        """Count the objects, and the orphans among them."""
        for checkpoint, shards in groupby(self._judged(items), lambda shard: shard[0].checkpoint):
            if checkpoint in self._manifests:
                self._look_for_unnamed(checkpoint, shards)
            elif checkpoint not in self._needed:
                self._count_folder(shards)
        self.job.checkpoints = len(self._manifests)

    def _judged(self, items: Iterable[Listed]) -> Iterator[tuple[keys.ShardObjectKey, Listed]]:
        """Count all objects, judge manifests and markers, and yield the others of checkpoints."""
        skip = len(keys.job_prefix(self._name.namespace, self._name.job_uid))
        for item in items:
            self.job.total.add(item)
            try:
                key = keys.parse_key(item.key[skip:])
            except FormatError:
                continue  # such an object is never deleted
            self.is_ours = True
            match key:
                case keys.ManifestKey():
                    self._manifests.add(key.checkpoint)
                case keys.NeededByKey():
                    if key.by in self._manifests:
                        self._needed.add(key.checkpoint)
                    else:
                        self._orphan(Orphan.MARKERS, item)
                case keys.NeedsKey():
                    if key.checkpoint not in self._manifests:
                        self._orphan(Orphan.MARKERS, item)
                case keys.ShardObjectKey():
                    yield key, item

    def _orphan(self, kind: Orphan, item: Listed) -> bool:
        """Count an object unless it is new, and return whether it was counted."""
        if item.age < self._quiet:
            return False
        self._count(kind, Total(1, item.size_bytes, item.age))
        return True

    def _count(self, kind: Orphan, total: Total) -> None:
        if total.objects:
            self._usage.orphans[kind].add_all(total)
            self.job.oldest_orphan = max(self.job.oldest_orphan or timedelta(0), total.oldest)

    def _count_folder(self, shards: Iterable[tuple[keys.ShardObjectKey, Listed]]) -> None:
        """Count the objects of a checkpoint without a manifest, if none of them is new."""
        found = {Orphan.SHARDS: Total(), Orphan.LAYOUTS: Total()}
        youngest = timedelta.max
        for key, item in shards:
            found[_kind_of(key)].add(item)
            youngest = min(youngest, item.age)
        if youngest >= self._quiet:
            for kind, total in found.items():
                self._count(kind, total)

    def _look_for_unnamed(
        self, checkpoint: CheckpointId, shards: Iterable[tuple[keys.ShardObjectKey, Listed]]
    ) -> None:
        """Count the objects of a checkpoint that its manifest does not name.

        A manifest names one shard of each rank, so it is read only where a rank has two.
        """
        doubtful = list[tuple[keys.ShardObjectKey, Listed]]()
        for _, of_rank in groupby(shards, lambda shard: shard[0].rank):
            found = list(of_rank)
            if len({key.blake3_prefix for key, _ in found}) > 1:
                doubtful += found
        if not doubtful:
            return
        named = self._named(checkpoint)
        for key, item in doubtful:
            if named is None or (key.rank, key.blake3_prefix) in named:
                continue
            is_orphan = self._orphan(_kind_of(key), item)
            if is_orphan and len(self.job.unnamed) < _MAX_UNNAMED:
                self.job.unnamed.append(item)

    def _named(self, checkpoint: CheckpointId) -> frozenset[tuple[Rank, str]] | None:
        """Return rank and digest of the shards that a manifest names. None if it cannot be read."""
        name = self._name
        try:
            document = self._tier.get_manifest(name.namespace, name.job_uid, checkpoint)
            manifest = parse_manifest_of(document, name.job_uid, checkpoint)
        except (NotFoundError, CorruptionError, FormatError) as error:
            logger.warning("the objects of %s are not judged: %s", checkpoint, error)
            return None
        shard_keys = (keys.parse_key(keys.shard_key(manifest.ref(s.rank))) for s in manifest.shards)
        return frozenset(
            (key.rank, key.blake3_prefix)
            for key in shard_keys
            if isinstance(key, keys.ShardObjectKey)
        )


def _kind_of(key: keys.ShardObjectKey) -> Orphan:
    return Orphan.LAYOUTS if key.kind is keys.ShardObject.LAYOUT else Orphan.SHARDS
