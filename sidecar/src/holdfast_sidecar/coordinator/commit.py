"""Which steps of a round are committed, at which level, and which are pruned.

1. The workers report that the shard of every rank is durable: the coordinator builds the manifest. It is
   deterministic, so any coordinator of the round builds the same bytes.
2. The manifest is durable on the coordinator's own node tier, then on every member's: the step is at level
   local.
3. Every rank has all its copies: the step is at level replicated, and older steps may be pruned.
4. Every rank is uploaded: the manifest is put into the store if absent, and the step is at level
   persisted (uploads.py).

Where ranks save faster than a node writes, steps wait in slots. `plan.choose` chooses which of them all ranks
write next, and which are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast_core import logs
from holdfast_core.errors import HoldfastError, RefusedError
from holdfast_core.ids import CheckpointId, Rank, Step, TierName, Worker, ranks_of
from holdfast_core.messages.schema import (
    Failure,
    Ok,
    Prune,
    Refusal,
    RestorePoint,
    Round,
    WorkerReport,
)
from holdfast_core.tasks import Signal, Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.ledger import Conflict, Ledger, StepEntry
from holdfast_sidecar.coordinator.plan import (
    SlotChoice,
    abandoned_steps,
    build_manifest,
    choose,
    lost_steps,
    steps_to_prune,
)
from holdfast_sidecar.coordinator.uploads import GangUploads
from holdfast_sidecar.upkeep.prune import protected_steps
from holdfast_sidecar.wire.following import Plans

_PRESSED_EVERY_SECONDS = 1.0
"""Interval of pruning while a node has no room. It gives the nodes time to delete what was pruned."""
_WEIGH_AFTER_SECONDS = 0.01
"""Least time for which reports are gathered before the step to write is chosen again."""
_WEIGHED_PER_SECOND = 200_000
"""Ranks that choices look at in a second, at most: each choice looks at all."""


@dataclass(slots=True)
class RoundParts:
    """What the parts of a coordinator work on."""

    pod: Pod
    tiers: Tiers
    failures: Failures
    message: Round
    """The ROUND, in the highest version that was received."""
    targets: Mapping[Worker, tuple[Worker, ...]]
    """Targets of `message`: the workers that receive copies of each worker's shards. They are kept, because
    the reports of a gang of which pods end ask for them."""
    ledger: Ledger
    gathered: Gathered
    plans: Plans
    uploads: GangUploads
    changed: Signal[[]]
    """Shows the operator a change now, and looks for messages that follow from it for any member.

    This looks at all members, so code that only counts the messages of one member must not call it."""


class Retention:
    """Which checkpoints the members have, and which of them are pruned."""

    def __init__(self, parts: RoundParts) -> None:
        self._parts = parts
        self._contract = parts.pod.settings.contract
        self._clock = parts.pod.clock
        self._store = parts.tiers.store
        self._pools = parts.tiers.pools
        self._ledger = parts.ledger
        self._gathered = parts.gathered
        self._uploads = parts.uploads
        self._plans = parts.plans
        self._older: set[CheckpointId] = set()
        """Checkpoints of older rounds on this round's lineage, and of this round where a member lacks its
        shard. Retention counts them besides the ledger's steps."""
        self._lost: set[Step] = set()
        """Steps of this round of which a member lost its shard before it had copies."""
        self._pressed = asyncio.Event()
        """Set when a report contains a failure for lack of room on a node."""

    def take_manifests(self, message: WorkerReport) -> set[Step]:
        """Record the checkpoints whose manifest a member has. Return the steps of this round that are new."""
        if not message.manifests:  # as in most reports of a large gang
            return set()
        base, round_ = self._parts.message.restore_point.step, message.round
        if base is not None:
            self._older |= {c for c in message.manifests if c.round < round_ and c.step <= base}
        found = {c.step for c in message.manifests if c.round == round_}
        new = {s for s in found - self._ledger.listed if base is None or s > base}
        self._ledger.listed |= new
        return new

    def look_for_lost(self, worker: Worker, *, everywhere: bool) -> None:
        """Look for listed steps that a worker, or any, has no shard of."""
        if not self._ledger.listed:
            return
        workers = self._gathered.has_all if everywhere else self._gathered.has_all & {worker}
        saves = self._gathered.saves(None if everywhere else worker)
        ranks = (Rank(r) for w in workers for r in ranks_of(w, self._contract.procs_per_worker))
        for step in lost_steps(self._ledger, saves, ranks):
            self.lost(step)

    def look(self, worker: Worker) -> None:
        """Act on the report of a worker: give up what can no longer be committed, and make room."""
        pressed = self._gathered.pressed
        if pressed:
            self._pressed.set()
        # Until the own manifests are listed, a committed step of which a node has lost its shard looks like
        # one that was never complete.
        if self._parts.message.coordinator in self._gathered.has_all:
            saves = self._gathered.saves(worker)
            ranks = map(Rank, ranks_of(worker, self._contract.procs_per_worker))
            self.give_up(abandoned_steps(self._ledger, saves, ranks, pressed=pressed))

    def lost(self, step: Step) -> None:
        """Handle that a member lacks its shard of a committed step of this round.

        The member pruned its shard before this coordinator started, or has found it damaged: the step is not
        sent to members again, is not uploaded, and is left to retention.
        """
        if not self._ledger.is_forgotten(step):
            self._uploads.lost(step)
            entry = self._ledger.steps.get(step)
            copied = entry is None or (self._ledger.expects_copies and entry.copied)
            self._ledger.forget((step,), pruned=False)
            if copied or step in self._ledger.listed:  # it may have had copies before this start
                self._older.add(CheckpointId(step, self._parts.message.round))
            else:
                self._lost.add(step)
            self._parts.changed()

    def retain(self) -> None:
        """Prune what the retention policy no longer keeps. Call this when a step has all its copies."""
        gone = steps_to_prune(
            self._ledger, self._parts.message, self._older, self._uploads.last, lost=self._lost
        )
        self._forget(gone)

    async def make_room(self) -> None:
        """Prune steps that the job can do without while a node has no room.

        This starts with the first report of the lack of room and repeats every second, because a commit may
        allow another step to be pruned without a report that follows it.
        """
        while True:
            await self._pressed.wait()
            if not self._gathered.pressed:
                self._pressed.clear()
                continue
            gone = steps_to_prune(
                self._ledger,
                self._parts.message,
                self._older,
                self._uploads.last,
                lost=self._lost,
                pressed=True,
                restored=self._gathered.running,
            )
            saves = self._gathered.saves()
            ranks = map(Rank, range(self._ledger.world_size))
            abandoned = abandoned_steps(self._ledger, saves, ranks, pressed=True)
            self.give_up({*gone, *abandoned, *self._ledger.overtaken(pressed=True)})
            await self._clock.sleep(_PRESSED_EVERY_SECONDS)

    def give_up(self, steps: Iterable[Step]) -> None:
        gone = tuple(sorted(set(steps) - self._ledger.on_way_to_store))
        if gone:
            logs.info("given up", steps=list(gone), pressed=self._gathered.pressed)
            self._forget(gone)
            self._parts.changed()

    def _forget(self, gone: tuple[Step, ...]) -> None:
        self._older = {c for c in self._older if c.step not in gone}
        self._lost -= set(gone)
        self._ledger.forget(gone)
        self._plans.wake()

    async def prune(self, message: Prune) -> Ok:
        """Delete checkpoints from the object store, each manifest before its other objects.

        Raises:
            RefusedError: PROTECTED if one of them must stay, in which case none is deleted; NOT_FOUND if
                the job has no object store.
        """
        if self._store is None:
            raise RefusedError(Refusal.NOT_FOUND, "this job has no object store")
        for point in message.checkpoints:
            self._may_leave_store(point)
        for point in message.checkpoints:
            if point.step is None or point.round is None:
                continue
            await self._pools.store.run(
                self._store.delete_checkpoint,
                point.job_namespace or self._contract.namespace,
                point.job_uid or self._contract.job_uid,
                CheckpointId(point.step, point.round),
            )
        return Ok(message.round)

    def _may_leave_store(self, point: RestorePoint) -> None:
        newest = self._uploads.last
        kept = protected_steps(self._parts.message) | self._ledger.on_way_to_store
        if newest is not None and newest.step is not None:
            kept |= {newest.step}
        if point.step in kept or point.job_uid not in (
            None,
            self._contract.job_uid,
        ):
            raise RefusedError(
                Refusal.PROTECTED,
                (
                    f"step {point.step} is the restore point, pinned, the newest persisted step, being "
                    "uploaded, or of another job"
                ),
            )


class Commits:
    """The way of each step to the levels local and replicated."""

    def __init__(self, parts: RoundParts, retention: Retention) -> None:
        self._parts = parts
        self._contract = parts.pod.settings.contract
        self._pools = parts.tiers.pools
        self._failures = parts.failures
        self._ledger = parts.ledger
        self._gathered = parts.gathered
        self._uploads = parts.uploads
        self._plans = parts.plans
        self._retention = retention
        self._tasks = Tasks()
        self._building = set[Step]()
        """Steps whose manifest is being built in a thread."""
        self._weighing: asyncio.TimerHandle | None = None
        """Set while `weigh_soon` has a call of `_weigh` scheduled."""
        self.dropped = 0
        """Steps that newer ones replaced before they were written or copied."""

    async def close(self) -> None:
        if self._weighing is not None:
            self._weighing.cancel()
        await self._tasks.cancel()

    @property
    def idle(self) -> bool:
        """Whether no step can reach a higher level without another save."""
        pending = self.choice().pending or self._ledger.pending
        return not (pending or self._ledger.on_way_to_store)

    def take_shards(self, message: WorkerReport) -> Failure | None:
        """Record the shards of a report, then act on the steps of which something is new.

        Returns:
            The first shard that is not accepted.
        """
        base = self._parts.message.restore_point.step
        new = set[Step]()
        refused: list[Failure] = []

        def refuse(step: Step, code: Refusal, why: str) -> None:
            refused.append(Failure(step, TierName.PEER, code, why, message.worker))

        for found in message.shards:
            step = found.step
            if found.round != message.round:
                with contextlib.suppress(Conflict):
                    self._ledger.take(found)
            elif base is not None and step <= base:
                why = f"step {step} is not above the restore point (step {base})"
                refuse(step, Refusal.BAD_REQUEST, why)
            elif not self._ledger.is_forgotten(step):
                try:
                    if self._ledger.take(found):
                        new.add(step)
                except Conflict as error:
                    refuse(step, Refusal.CONFLICT, str(error))
        # All shards are recorded first: a choice about slots must not take a later one of them for skipped.
        for step in sorted(new):
            self._advance(step)
        if new and message.worker == self._parts.message.coordinator:
            self._parts.changed()  # The other members may have the manifest now.
        return refused[0] if refused else None

    def _advance(self, step: Step) -> None:
        """Act on what has become known of the shards of a step."""
        entry = self._ledger.steps.get(step)
        if entry is None:
            return  # given up because of another step of the same report
        if entry.complete and entry.manifest is None:
            self._build(entry)
        if self._ledger.settle_local(step):
            self._is_local(step)
            return
        self.weigh_soon()
        if self._ledger.settle_replicated(step):
            self._retention.retain()
            self._parts.changed()

    def _build(self, entry: StepEntry) -> None:
        """Build the manifest of a step whose shards are all known, unless that is under way."""
        if entry.step not in self._building:
            self._building.add(entry.step)
            self._tasks.spawn(self._commit(entry), f"manifest of step {entry.step}")

    async def _commit(self, entry: StepEntry) -> None:
        """Build the manifest of a step in a thread. The plan names it from then on."""
        try:
            parent = self._parts.message.restore_point.manifest
            built = await self._pools.read.run(build_manifest, self._contract, parent, entry)
        except HoldfastError as error:
            self._failures.note(
                f"manifest of step {entry.step}", TierName.NODE, error, step=entry.step
            )
            return
        finally:
            self._building.discard(entry.step)
        if self._ledger.steps.get(entry.step) is not entry:
            return  # The step was given up meanwhile.
        try:
            self._ledger.committed(entry.step, built.manifest, built.digest, built.shards)
        except Conflict as error:
            logs.warning("conflicting digests", error=str(error))
            return
        logs.info("manifest built", step=entry.step, round=entry.round, manifest=built.digest)
        self._parts.changed()
        self._advance(entry.step)  # The nodes have it already if the last coordinator built it.

    def _is_local(self, step: Step) -> None:
        """Act on a step that has just become local."""
        logs.info("committed locally", step=step, round=self._parts.message.round)
        self._ledger.settle_replicated(step)
        self._uploads.committed(step)
        if self._ledger.steps[step].copied:
            self._retention.retain()
        elif gone := self._ledger.overtaken():
            self.dropped += len(gone)
            self._ledger.forget(gone)
            self._plans.wake()
        self._weigh()
        self._parts.changed()

    def weigh_soon(self) -> None:
        """Call `_weigh` after a short time, once for all messages until then, if a step waits."""
        if self._weighing is None and self._gathered.waits:
            loop = asyncio.get_running_loop()
            delay = max(_WEIGH_AFTER_SECONDS, self._gathered.world_size / _WEIGHED_PER_SECOND)
            self._weighing = loop.call_later(delay, self._weigh)

    def choice(self) -> SlotChoice:
        """Return what becomes of the steps that wait in slots. If there are none, this looks at no rank."""
        if not self._gathered.waits and self._ledger.chosen is None:
            return SlotChoice()
        base = self._parts.message.restore_point.step
        return choose(self._ledger, self._gathered.saves(), base)

    def _weigh(self) -> None:
        """Choose again which waiting step is written next, and drop those that are no longer needed."""
        if self._weighing is not None:
            self._weighing.cancel()
            self._weighing = None
        before, choice = self._ledger.chosen, self.choice()
        self._ledger.chosen = choice.chosen
        if choice.chosen != before:
            self._plans.wake()
        if choice.dropped:
            logs.info("dropped from slots", steps=list(choice.dropped), chosen=choice.chosen)
            self.dropped += len(choice.dropped)
            self._ledger.forget(choice.dropped)
            self._plans.wake()
