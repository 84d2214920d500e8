"""The checkpoints of one training in an object store: of a folder that uploads there, or of a TrainingJob.

This module imports packages that only the extra `holdfast-sdk[s3]` installs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from holdfast.directory.choice import JOB_UID, NAMESPACE
from holdfast.reading.source import ListedCheckpoint, listed_below, listed_from
from holdfast_core.drill import DrillPlace
from holdfast_core.errors import ConfigError, FormatError, NotFoundError
from holdfast_core.format import keys
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef, TierName, age_of
from holdfast_core.retention import RetentionReason
from holdfast_core.store.drilled import StoredJob
from holdfast_core.store.open import open_tier
from holdfast_core.store.rules import QUIET, STALE_UPLOADS, abandoned
from holdfast_core.store.tier import Dead, ObjectTier
from holdfast_core.store_url import StoreUrl
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.objects import checkpoints_in, count_shards

_SHOWN_JOBS = 10


class StoreSource(Closing):
    """CheckpointSource of a training in an object store. It writes nothing to the store but in `delete`."""

    tier = TierName.OBJECT

    def __init__(
        self, url: StoreUrl, tier: ObjectTier, namespace: str = NAMESPACE, uid: JobUid = JOB_UID
    ) -> None:
        self._tier = tier
        self.namespace = namespace
        self.job_uid = uid
        self.is_of_folder = (namespace, uid) == (NAMESPACE, JOB_UID)
        """Whether a run in a folder uploaded it, and no TrainingJob."""
        self.name = str(url) if self.is_of_folder else f"{url}/{namespace}/{uid}"

    @classmethod
    def open(cls, url: StoreUrl, env: Mapping[str, str]) -> Self:
        """Open the only training of a prefix, or the one that the URL names: prefix/namespace/uid.

        A prefix without any checkpoint is taken for one that a folder will upload to.

        Raises:
            ConfigError: The endpoint or profile is not valid, or the prefix holds several trainings.
            AccessDeniedError: The keys do not suffice.
            UnavailableError: The store does not answer.
        """
        found = cls.open_each(url, env, _SHOWN_JOBS + 1)
        if len(found) == 1:
            return found[0]
        with found[0]:  # they share the tier
            raise ConfigError(_choose_one(url, found))

    @classmethod
    def open_each(
        cls, url: StoreUrl, env: Mapping[str, str], limit: int | None = None
    ) -> Sequence[Self]:
        """Open each training of a prefix, as `open` does for one. At least one is returned.

        They share their connections: closing one of them closes all.
        """
        parent, namespace, uid = _parts(url)
        tier = open_tier(parent, env)
        try:
            if uid and tier.list_manifests(namespace, JobUid(uid)):
                return [cls(parent, tier, namespace, JobUid(uid))]
        except FormatError:
            pass  # the last names of the prefix are none of a job
        except BaseException:
            tier.close()
            raise
        tier.close()
        tier = open_tier(url, env)
        try:
            jobs = itertools.islice(tier.jobs(), limit)
            return [cls(url, tier, *job) for job in jobs] or [cls(url, tier)]
        except BaseException:
            tier.close()
            raise

    def job_name(self) -> str | None:
        """See CheckpointSource.job_name. The name is that of the newest manifest, or the uid without one."""
        if self.is_of_folder:
            return None
        name: str = self.job_uid
        if known := self.checkpoints():
            with suppress(FormatError, NotFoundError):  # damaged, or deleted meanwhile
                name = self.manifest(known[0]).job.name
        return f"{self.namespace}/{name}"

    def checkpoints(self) -> list[CheckpointId]:
        found = self._tier.list_manifests(self.namespace, self.job_uid)
        return sorted(found, key=age_of, reverse=True)

    def listed(self, only: CheckpointId | None = None) -> list[ListedCheckpoint]:
        objects = self._tier.job(self.namespace, self.job_uid)
        manifests, shards = listed_below(only)
        found = checkpoints_in(objects.list(manifests))
        count_shards(found, objects.list_each(keys.parts_of(shards, found)))
        return listed_from(found, None, only)

    def references(self, checkpoint: CheckpointId) -> Mapping[CheckpointId, int]:
        return self._tier.get_references(self.namespace, self.job_uid, checkpoint)

    def needed(self) -> Mapping[RetentionReason, Collection[CheckpointId]]:
        """Return nothing: a store has no pins, and does not know its readers."""
        return {}

    def delete(
        self, wanted: Iterable[CheckpointId]
    ) -> Iterator[tuple[CheckpointId, RetentionReason | None]]:
        for checkpoint in wanted:
            self._tier.delete_checkpoint(self.namespace, self.job_uid, checkpoint)
            yield checkpoint, None

    def sweep(self) -> int:
        """Delete what no checkpoint needs, of a training that uploads nothing more. Return the bytes.

        An object that is half written, for less than a day, may be of an upload that goes on, and whose
        other shards have been stored for hours: the newest round stays then.
        """
        objects = self._tier.job(self.namespace, self.job_uid)

        def judge() -> Dead:
            uploads = any(item.age < STALE_UPLOADS for item in objects.unfinished())
            return partial(abandoned, ended=not uploads)

        swept = objects.sweep(QUIET, judge)
        return sum(total.size_bytes for total in swept.values())

    def pin(self, checkpoint: CheckpointId) -> None:
        raise ConfigError(
            f"{self.name}: a checkpoint in a store cannot be pinned by itself, because a store keeps no "
            "marks. Pin it in the folder that uploads here (its pins hold the copy as well), pin the "
            "Checkpoint object of a TrainingJob, or keep a copy of your own (holdfast export)"
        )

    def unpin(self, checkpoint: CheckpointId) -> None:
        self.pin(checkpoint)

    def claim(self, checkpoint: CheckpointId) -> object:
        """Return None: a run that uploads to the store cannot see its readers."""
        return None

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        document = self._tier.get_manifest(self.namespace, self.job_uid, checkpoint)
        return parse_manifest_of(document, self.job_uid, checkpoint)

    def lacks(self, checkpoint: CheckpointId) -> list[int]:
        stored = self._tier.shards_stored(self.namespace, self.job_uid, checkpoint)
        shards = self.manifest(checkpoint).shards
        return [s.rank for s in shards if (s.rank, s.blake3[3:19]) not in stored]

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        return self._tier.get_layout(self.namespace, ref, digest)

    def open_shard(self, ref: ShardRef) -> ShardSource:
        return self._tier.open_shard(self.namespace, ref)

    def drilled(self) -> DrillPlace:
        return StoredJob(self._tier, self.namespace, self.job_uid)

    def close(self) -> None:
        self._tier.close()


def _parts(url: StoreUrl) -> tuple[StoreUrl, str, str]:
    """Split a URL into the store, and the namespace and uid that its last two names may be."""
    if url.directory:
        path = Path(url.directory)
        if not (path / "manifests").is_dir():
            return url, "", ""
        return replace(url, directory=str(path.parent.parent)), path.parent.name, path.name
    prefix, _, uid = url.prefix.rpartition("/")
    parent, _, namespace = prefix.rpartition("/")
    return replace(url, prefix=parent), namespace, uid


def _choose_one(url: StoreUrl, found: Sequence[StoreSource]) -> str:
    lines = [f"{url} holds the checkpoints of several trainings. Open one of them:"]
    for source in found[:_SHOWN_JOBS]:
        known = source.checkpoints()
        if not known:
            continue  # deleted meanwhile
        job = source.job_name()
        name = "uploaded by a folder" if job is None else f"job {job.rpartition('/')[2]}"
        place = f"{url}/{source.namespace}/{source.job_uid}"
        lines.append(f"  {place}  {name}, newest step {known[0].step}")
    if len(found) > _SHOWN_JOBS:
        lines.append(f"  and more: {url}/NAMESPACE/UID names each of them")
    return "\n".join(lines)
