"""The coordinator's memory of one round, without I/O: which rank got how far with which step, what
may be committed, uploaded and pruned.

Steps of a round advance: prepared by all ranks -> manifest -> acknowledged by every member (memory;
local once every rank's shard is on its node tier) -> replicated by all ranks -> uploaded by all
ranks (persisted). Each method is idempotent: senders repeat themselves after every reconnect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_core.ids import Digest, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import RankHolding, RestorePoint, ShardInfo, StepState
from holdfast_sidecar.coordinator.forgotten import Forgotten
from holdfast_sidecar.save.plan import StoredAs

MAX_WAITING_UPLOADS = 2
MAX_UNREPLICATED = 4
"""Committed steps that may wait for their copies before those in the middle are given up."""


@dataclass(slots=True)
class StepEntry:
    """One step of this round."""

    step: Step
    round: RestartRound
    world_size: int
    shards: dict[Rank, ShardInfo] = field(default_factory=dict)
    layouts: dict[Rank, Digest] = field(default_factory=dict)
    durable: set[Rank] = field(default_factory=set)
    """Said that its shard is on its node tier. Never inferred: an acknowledged manifest proves none."""
    held: set[Rank] = field(default_factory=set)
    """Said that its shard is in shared memory only."""
    failed: bool = False
    """A held shard could not be written: the step may serve a seal, but nobody waits for it."""
    lost: bool = False
    """A held shard is gone, and with it the step."""
    manifest: bytes | None = None
    manifest_digest: Digest | None = None
    layout: bytes | None = None
    acknowledged: set[Worker] = field(default_factory=set)
    replicated: set[Rank] = field(default_factory=set)
    uploaded: dict[Rank, StoredAs] = field(default_factory=dict)
    whole: bool = False
    """What the shards referred to is gone from the store: they are uploaded without references."""
    memory: bool = False
    local: bool = False
    copied: bool = False
    persisted: bool = False

    @property
    def level(self) -> Level | None:
        """The highest level reached from local on; persisted is one whether or not the copies are
        there. Level memory is told apart from these (`memory`): it is no promise."""
        if self.persisted:
            return Level.PERSISTED
        if self.local and self.copied:
            return Level.REPLICATED
        return Level.LOCAL if self.local else None

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.world_size

    @property
    def payload_bytes(self) -> int:
        return sum(s.payload_bytes for s in self.shards.values())

    def point(self) -> RestorePoint:
        return RestorePoint(self.step, self.round, self.manifest_digest)

    def state(self) -> StepState:
        return StepState(
            step=self.step,
            round=self.round,
            level=self.level,
            prepared=len(self.shards),
            replicated=len(self.replicated),
            uploaded=len(self.uploaded),
            world_size=self.world_size,
            manifest=self.manifest_digest,
            payload_bytes=self.payload_bytes,
        )


class Conflict(Exception):
    """Another digest for a shard or manifest that is known already: an alarm, never overwritten."""


class Ledger:
    """All steps of one round. `expects_copies` False: local implies replicated."""

    def __init__(
        self,
        round_: RestartRound,
        world_size: int,
        workers: tuple[Worker, ...],
        *,
        expects_copies: bool,
    ) -> None:
        self.round = round_
        self.world_size = world_size
        self.workers = frozenset(workers)
        self.expects_copies = expects_copies
        self.steps: dict[Step, StepEntry] = {}
        self.uploading: Step | None = None
        self.waiting_uploads: list[Step] = []
        self._forgotten = Forgotten()
        self.writing: dict[Rank, Step] = {}
        """What the ranks that hold something write now."""
        self.named: dict[Rank, frozenset[Step]] = {}
        """What waits in each rank's slots, digested or not."""
        self.chosen: Step | None = None
        """The held step that is to be written next, or is."""

    # ------------------------------------------------------------------ what members say

    def entry(self, step: Step) -> StepEntry:
        if step not in self.steps:
            self.steps[step] = StepEntry(step, self.round, self.world_size)
        return self.steps[step]

    def prepared(self, step: Step, shard: ShardInfo, layout: Digest) -> StepEntry:
        """Durable on the rank's node tier. Raises Conflict when this rank said something else about
        this step before."""
        entry = self._take(step, shard, layout)
        entry.durable.add(shard.rank)
        entry.held.discard(shard.rank)
        return entry

    def _take(self, step: Step, shard: ShardInfo, layout: Digest) -> StepEntry:
        entry = self.entry(step)
        known = entry.shards.get(shard.rank)
        if known is not None and known.blake3 != shard.blake3:
            raise Conflict(
                f"rank {shard.rank} step {step} round {self.round}: PREPARED {shard.blake3}, "
                f"but {known.blake3} was prepared before"
            )
        entry.shards[shard.rank] = shard
        entry.layouts[shard.rank] = layout
        return entry

    def holds(self, said: RankHolding, base: Step | None = None) -> tuple[Step, ...]:
        """All that a rank holds in memory now: what it held before and does not name is lost, unless
        it is durable. Returns what it is to drop: steps that were pruned or are not above `base`, and
        those that contradict what is known of them (they are lost)."""
        drop: list[Step] = []
        for shard in said.shards:
            if self.is_forgotten(shard.step) or (base is not None and shard.step <= base):
                drop.append(shard.step)
                continue
            try:
                entry = self._take(shard.step, shard.shard, shard.layout)
            except Conflict:
                drop.append(shard.step)
                self.steps[shard.step].lost = True
                continue
            entry.failed = entry.failed or shard.failed
            if shard.stored:
                entry.durable.add(said.rank)
                entry.held.discard(said.rank)
            elif said.rank not in entry.durable:
                entry.held.add(said.rank)
        there = {s.step for s in said.shards}.union(said.digesting)
        self.named[said.rank] = frozenset(there - {s.step for s in said.shards if s.stored})
        for entry in self.steps.values():
            if said.rank in entry.held and entry.step not in there:
                entry.held.discard(said.rank)
                entry.lost = True
        if said.writing is None:
            self.writing.pop(said.rank, None)
        else:
            self.writing[said.rank] = said.writing
        return tuple(drop)

    def committed(
        self, step: Step, manifest: bytes, digest: Digest, shards: tuple[ShardInfo, ...]
    ) -> StepEntry:
        """A manifest of this round that exists already (built now, or found on a node tier)."""
        entry = self.entry(step)
        if entry.manifest_digest not in (None, digest):
            raise Conflict(
                f"step {step} round {self.round}: manifest {digest}, "
                f"but {entry.manifest_digest} exists"
            )
        entry.manifest, entry.manifest_digest = manifest, digest
        entry.shards = {s.rank: s for s in shards}
        return entry

    def acknowledged(self, step: Step, worker: Worker) -> Level | None:
        """A member has the manifest. See `rise`."""
        self.entry(step).acknowledged.add(worker)
        return self.rise(step)

    def rise(self, step: Step) -> Level | None:
        """MEMORY or LOCAL if the step has reached that level now, by what was said of it."""
        entry = self.steps[step]
        if entry.local or entry.lost or not self.workers <= entry.acknowledged:
            return None
        if len(entry.durable) == entry.world_size:
            entry.memory = entry.local = True
            if not self.expects_copies:
                entry.copied = True
            return Level.LOCAL
        if entry.memory or len(entry.durable | entry.held) < entry.world_size:
            return None
        entry.memory = True
        return Level.MEMORY

    def replicated(self, step: Step, rank: Rank, blake3: Digest) -> bool:
        """True if all ranks are there now (and the step is local): level replicated."""
        entry = self.entry(step)
        self._same(entry, rank, blake3)
        entry.replicated.add(rank)
        return self.settle_replicated(step)

    def settle_replicated(self, step: Step) -> bool:
        entry = self.steps[step]
        if entry.copied or not entry.local or len(entry.replicated) < entry.world_size:
            return False
        entry.copied = True
        return True

    def uploaded(
        self, step: Step, rank: Rank, blake3: Digest, stored_as: StoredAs | None = None
    ) -> bool:
        """True if every shard is in the store now and the manifest may follow."""
        entry = self.entry(step)
        self._same(entry, rank, blake3)
        stored_as = stored_as or StoredAs()
        if entry.whole and stored_as.references:
            return False  # said before it was asked to store the shard whole
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
        """Queue a committed step for the store. Returns the step that had to give way, if one did:
        the oldest waiting one (never the one that is being uploaded)."""
        entry = self.steps[step]
        if entry.persisted or step == self.uploading or step in self.waiting_uploads:
            return None
        self.waiting_uploads.append(step)
        self.waiting_uploads.sort()
        if len(self.waiting_uploads) > MAX_WAITING_UPLOADS:
            return self.waiting_uploads.pop(0)
        return None

    def next_upload(self) -> Step | None:
        """Starts the oldest waiting step if nothing is being uploaded."""
        if self.uploading is None and self.waiting_uploads:
            self.uploading = self.waiting_uploads[0]
            del self.waiting_uploads[0]  # after it: a sweep's thread must see the step somewhere
        return self.uploading

    def upload_ended(self, step: Step, *, persisted: bool) -> None:
        if persisted and step in self.steps:
            self.steps[step].persisted = True
        if self.uploading == step:
            self.uploading = None

    def upload_whole(self, step: Step) -> None:
        """What its shards referred to is gone: those are uploaded once more."""
        entry = self.steps[step]
        entry.whole = True
        entry.uploaded = {r: s for r, s in entry.uploaded.items() if not s.references}

    def give_up_uploads(self) -> tuple[Step, ...]:
        """Forget everything that is on its way to the store; returns which steps that were."""
        given_up = ([] if self.uploading is None else [self.uploading]) + self.waiting_uploads
        self.uploading = None
        self.waiting_uploads = []
        return tuple(given_up)

    @property
    def on_way_to_store(self) -> frozenset[Step]:
        waiting = frozenset(self.waiting_uploads)
        return waiting if self.uploading is None else waiting | {self.uploading}

    # ------------------------------------------------------------------ what holds

    def newest(self, level: Level) -> StepEntry | None:
        def reached(entry: StepEntry) -> bool:
            match level:
                case Level.MEMORY:
                    return entry.memory and not entry.lost
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
        """Steps that can still get further without anybody saving again."""
        return tuple(
            s
            for s, e in self.steps.items()
            if e.complete and not (e.local and e.copied) and not (e.failed or e.lost)
        )

    def overtaken(self, *, pressed: bool = False) -> tuple[Step, ...]:
        """Committed steps whose copies fall behind: given up between the one being copied and the
        newest two, so that a slow peer does not fill the node volumes (docs/guarantees.md I7). `pressed`: a
        node has no room for a copy, so that all but the one being copied go."""
        behind = sorted(s for s, e in self.steps.items() if e.local and not e.copied)
        if pressed:
            return tuple(behind[1:])
        return tuple(behind[1:-2]) if len(behind) > MAX_UNREPLICATED else ()

    def forget(self, steps: tuple[Step, ...], *, pruned: bool = True) -> None:
        """A sender that repeats itself later must not bring them back. What is on its way to the store
        stays. `pruned`: their shards are deleted."""
        for step in sorted(set(steps) - self.on_way_to_store):
            entry = self.steps.pop(step, None)
            if entry is not None:
                self._forgotten.add(step, entry.manifest_digest, pruned=pruned)

    def is_forgotten(self, step: Step) -> bool:
        return self._forgotten.has(step, self.steps)

    def forgotten_manifest(self, step: Step) -> Digest | None:
        return self._forgotten.manifest(step)

    def is_pruned(self, step: Step) -> bool:
        """It is gone, and what is left of it anywhere is to be deleted."""
        return step not in self.steps and self._forgotten.is_pruned(step)

    def states(self, limit: int) -> tuple[StepState, ...]:
        """Newest steps, oldest first."""
        newest = sorted(self.steps)[-limit:]
        return tuple(self.steps[s].state() for s in newest)
