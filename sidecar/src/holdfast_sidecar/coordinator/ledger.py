"""The coordinator's record of one round: how far each rank is with each step. No I/O.

It decides what may be committed, uploaded and pruned.

A step advances in this order: the shards of all ranks are durable; the manifest exists; every node has it
(local); all ranks have replicated it; all ranks have uploaded it and its manifest is in the
store (persisted). Each method is idempotent, because each report of a worker lists all of its shards.

Steps that were pruned or given up are remembered in `Forgotten`, because a report that lists one would bring
it back. Their number is bounded, because a round may last for months.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import CheckpointId, Digest, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import ReportedShard, RestorePoint, ShardInfo, StoredAs
from holdfast_core.store.rules import UploadQueue

MAX_FORGOTTEN = 1024
"""Steps that are recorded individually. Of those that went earlier only the highest number is kept: a step up
to that number counts as forgotten unless it exists."""


class Forgotten:
    """Bounded record of forgotten steps."""

    def __init__(self) -> None:
        self._steps: dict[Step, bool] = {}
        """Whether the shards of each step are to be deleted."""
        self._below = Step(-1)

    def add(self, step: Step, *, pruned: bool) -> None:
        """Record a step.

        Args:
            pruned: Shards of the step are to be deleted wherever they still appear.
        """
        self._steps.pop(step, None)
        self._steps[step] = pruned
        while len(self._steps) > MAX_FORGOTTEN:
            # By the time, not the number: a step that was pinned for long goes after newer ones.
            oldest = next(iter(self._steps))
            del self._steps[oldest]
            self._below = max(self._below, oldest)

    @property
    def pruned(self) -> tuple[Step, ...]:
        """The recorded steps whose shards are to be deleted.

        A step that is no longer recorded individually is not among them: nothing is deleted without a reason.
        """
        return tuple(step for step, pruned in self._steps.items() if pruned)

    def has(self, step: Step, known: Iterable[Step]) -> bool:
        """Return whether a step is forgotten.

        Args:
            known: The steps that exist. They may be older than any recorded step.
        """
        return step in self._steps or (step <= self._below and step not in known)


MAX_UNREPLICATED = 4
"""Committed steps that may wait for their copies. Beyond that, those in the middle are given up."""


@dataclass(slots=True)
class StepEntry:
    """One step of this round."""

    step: Step
    round: RestartRound
    world_size: int
    shards: dict[Rank, ShardInfo] = field(default_factory=dict)
    layouts: dict[Rank, LayoutDigests] = field(default_factory=dict)
    durable: set[Rank] = field(default_factory=set)
    """Ranks that reported their shard as stored on their node tier. This is never inferred: a manifest
    does not prove it."""
    manifest: bytes | None = None
    manifest_digest: Digest | None = None
    stored: set[Rank] = field(default_factory=set)
    """Ranks whose node has the manifest."""
    replicated: set[Rank] = field(default_factory=set)
    uploaded: dict[Rank, StoredAs] = field(default_factory=dict)
    local: bool = False
    copied: bool = False
    persisted: bool = False

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.step, self.round)

    @property
    def level(self) -> Level | None:
        """The highest level reached, from local on.

        A persisted step need not be replicated.
        """
        if self.persisted:
            return Level.PERSISTED
        if self.local and self.copied:
            return Level.REPLICATED
        return Level.LOCAL if self.local else None

    @property
    def complete(self) -> bool:
        """Whether the shards of all ranks are known."""
        return len(self.shards) == self.world_size

    @property
    def payload_bytes(self) -> int:
        return sum(s.payload_bytes for s in self.shards.values())

    def known_of(self, rank: Rank) -> tuple[object, ...]:
        """Return how far a rank's shard is."""
        done = (self.durable, self.stored, self.replicated)
        return *(rank in ranks for ranks in done), self.uploaded.get(rank)

    def point(self) -> RestorePoint:
        return RestorePoint(self.step, self.round, self.manifest_digest)


class Conflict(Exception):
    """Error: a message names another digest for a known shard or manifest, which is never overwritten."""


class Ledger:
    """All steps of one round. If `expects_copies` is False, local implies replicated."""

    def __init__(
        self,
        round_: RestartRound,
        world_size: int,
        workers: tuple[Worker, ...],
        *,
        first: frozenset[Rank],
        expects_copies: bool,
    ) -> None:
        self.round = round_
        self.world_size = world_size
        self.workers = frozenset(workers)
        self.first = first
        """The ranks of the coordinator's node, which stores manifests before the others."""
        self.expects_copies = expects_copies
        self.steps: dict[Step, StepEntry] = {}
        self.uploads = UploadQueue()
        """Replaced as a whole, because a sweep reads it in another thread."""
        self._forgotten = Forgotten()
        self.listed = set[Step]()
        """Steps of this round of which a member had the manifest when this coordinator started."""
        self.chosen: Step | None = None
        """The step that ranks write next from slots where it waits, or that they are writing."""

    # ------------------------------------------------------------------ messages of members

    def entry(self, step: Step) -> StepEntry:
        if step not in self.steps:
            self.steps[step] = StepEntry(step, self.round, self.world_size)
        return self.steps[step]

    def take(self, found: ReportedShard) -> bool:
        """Record what a worker reports of a shard. Return whether any of it is new.

        Nothing is taken back: the order of reports does not matter.

        Of an older round, only the upload of a step that was adopted is of interest.

        Raises:
            Conflict: The rank reported another digest for this step before.
        """
        step, rank, blake3 = found.step, found.shard.rank, found.shard.blake3
        if found.round != self.round:
            known = self.steps.get(step)
            if known is None or known.round != found.round or not found.uploaded:
                return False
            stored = known.uploaded.get(rank)
            self.uploaded(step, rank, blake3, found.uploaded)
            return known.uploaded.get(rank) != stored
        known = self.steps.get(step)
        layout = found.layout or (None if known is None else known.layouts.get(rank))
        if layout is None:
            return False  # The last coordinator had it. The worker is asked for all shards.
        entry = self.entry(step)
        before = entry.known_of(rank)
        self.prepared(step, found.shard, layout)
        if found.committed:
            entry.stored.add(rank)
        if found.replicated:
            entry.replicated.add(rank)
        if found.uploaded:
            self.uploaded(step, rank, blake3, found.uploaded)
        return before != entry.known_of(rank)

    def prepared(self, step: Step, shard: ShardInfo, layout: LayoutDigests) -> StepEntry:
        """Record that a shard is durable on its rank's node tier.

        Raises:
            Conflict: The rank reported another digest for this step before.
        """
        entry = self.entry(step)
        known = entry.shards.get(shard.rank)
        if known is not None and known.blake3 != shard.blake3:
            raise Conflict(
                f"rank {shard.rank} step {step} round {self.round}: {shard.blake3} is reported, "
                f"but {known.blake3} was reported before"
            )
        entry.shards[shard.rank] = shard
        entry.layouts[shard.rank] = layout
        entry.durable.add(shard.rank)
        return entry

    def committed(
        self, step: Step, manifest: bytes, digest: Digest, shards: tuple[ShardInfo, ...]
    ) -> StepEntry:
        """Record a manifest of this round that was built now or found on a node tier.

        Raises:
            Conflict: Another manifest of this step is known.
        """
        entry = self.entry(step)
        if entry.manifest_digest not in (None, digest):
            raise Conflict(
                f"step {step} round {self.round}: manifest {digest}, "
                f"but {entry.manifest_digest} exists"
            )
        entry.manifest, entry.manifest_digest = manifest, digest
        entry.shards = {s.rank: s for s in shards}
        return entry

    def adopt(
        self, id_: CheckpointId, manifest: bytes, digest: Digest, shards: tuple[ShardInfo, ...]
    ) -> None:
        """Record a step of an older round that all members of this round have."""
        entry = StepEntry(id_.step, id_.round, self.world_size)
        entry.manifest, entry.manifest_digest = manifest, digest
        entry.shards = {s.rank: s for s in shards}
        entry.stored, entry.durable = set(entry.shards), set(entry.shards)
        entry.local = entry.copied = True
        self.steps[id_.step] = entry

    def settle_local(self, step: Step) -> bool:
        """Raise a step to level local if the nodes of all ranks have it. Return whether it rose."""
        entry = self.steps[step]
        if entry.local or entry.manifest is None or len(entry.stored) < entry.world_size:
            return False
        if len(entry.durable) < entry.world_size:
            return False
        entry.local = True
        if not self.expects_copies:
            entry.copied = True
        return True

    def settle_replicated(self, step: Step) -> bool:
        """Raise a local step to level replicated if all ranks have their copies. Return whether it rose."""
        entry = self.steps[step]
        if entry.copied or not entry.local or len(entry.replicated) < entry.world_size:
            return False
        entry.copied = True
        return True

    def uploaded(
        self, step: Step, rank: Rank, blake3: Digest, stored_as: StoredAs | None = None
    ) -> bool:
        """Record that a rank's shard is in the store. Return whether the manifest may follow now.

        Raises:
            Conflict: The rank prepared another digest.
        """
        entry = self.entry(step)
        self._same(entry, rank, blake3)
        stored_as = stored_as or StoredAs()
        if not self.uploads.counts(entry.checkpoint, stored_as):
            return False
        entry.uploaded[rank] = stored_as
        return entry.manifest is not None and len(entry.uploaded) == entry.world_size

    def _same(self, entry: StepEntry, rank: Rank, blake3: Digest) -> None:
        known = entry.shards.get(rank)
        if known is not None and known.blake3 != blake3:
            raise Conflict(
                f"rank {rank} step {entry.step}: {blake3}, but {known.blake3} was prepared"
            )

    # ------------------------------------------------------------------ uploads

    def request_upload(self, step: Step) -> Step | None:
        """Queue a committed step for the store. Return the waiting step that is left out for it, if any."""
        entry = self.steps[step]
        if entry.persisted:
            return None
        self.uploads, left_out = self.uploads.added(entry.checkpoint)
        return None if left_out is None else left_out.step

    def upload_ended(self, entry: StepEntry, *, persisted: bool) -> None:
        entry.persisted = entry.persisted or persisted
        self.uploads = self.uploads.without(entry.checkpoint)

    def upload_whole(self, entry: StepEntry) -> None:
        """Require that shards of the uploading step are uploaded again without references."""
        self.uploads = self.uploads.requested_whole()
        entry.uploaded = {
            r: s for r, s in entry.uploaded.items() if self.uploads.counts(entry.checkpoint, s)
        }

    @property
    def on_way_to_store(self) -> frozenset[Step]:
        return frozenset(checkpoint.step for checkpoint in self.uploads.wanted)

    # ------------------------------------------------------------------ queries

    def newest(self, level: Level) -> StepEntry | None:
        """Return the newest step that has reached this level, if there is one."""

        def reached(entry: StepEntry) -> bool:
            match level:
                case Level.LOCAL:
                    return entry.local
                case Level.REPLICATED:
                    return entry.local and entry.copied
                case Level.PERSISTED:
                    return entry.persisted

        found = [e for e in self.steps.values() if reached(e)]
        return max(found, key=lambda e: e.step, default=None)

    @property
    def pending(self) -> tuple[Step, ...]:
        """Complete steps that can still reach level local or replicated without another save."""
        return tuple(s for s, e in self.steps.items() if e.complete and not (e.local and e.copied))

    def overtaken(self, *, pressed: bool = False) -> tuple[Step, ...]:
        """Return the committed steps to give up because their copies are late.

        If more than `MAX_UNREPLICATED` steps wait for copies, these are all but the oldest, which is being
        copied, and the newest two. This keeps a slow peer from filling the node volumes (docs/guarantees.md
        I7).

        Args:
            pressed: A node has no room for a copy: all but the oldest are given up.
        """
        behind = sorted(s for s, e in self.steps.items() if e.local and not e.copied)
        if pressed:
            return tuple(behind[1:])
        return tuple(behind[1:-2]) if len(behind) > MAX_UNREPLICATED else ()

    def forget(self, steps: tuple[Step, ...], *, pruned: bool = True) -> None:
        """Remove steps, and remember them so that a repeated message does not bring them back.

        Steps on their way to the store stay.

        Args:
            pruned: Their shards are to be deleted wherever they still appear.
        """
        for step in sorted(set(steps) - self.on_way_to_store):
            self.steps.pop(step, None)
            self._forgotten.add(step, pruned=pruned)

    def is_forgotten(self, step: Step) -> bool:
        return self._forgotten.has(step, self.steps)

    @property
    def dropped(self) -> tuple[Step, ...]:
        """The newest steps that are forgotten and whose remaining shards are to be deleted."""
        return tuple(s for s in self._forgotten.pruned if s not in self.steps)

    def newest_committed(self, limit: int) -> tuple[Step, ...]:
        """Return the newest `limit` committed steps, oldest first."""
        return tuple(sorted(s for s, e in self.steps.items() if e.level is not None)[-limit:])
