"""Turn full slots into durable shards on the node tier.

1. The rank sends Stage. The slot's header must agree with the message. The sidecar then owns the slot and
   replies `Staged`; from then on the slot's bytes do not change.
2. A thread digests and writes the slot in one pass.
3. The slot becomes free, and the shard is passed to `Flow`.

If step 2 fails, the failure is sent to the rank and reported to the coordinator, and training continues.
The slot is freed, unless it was buffered and its bytes are still good: then it stays buffered.

With three slots or more, a slot that is staged while an earlier one of the rank is being written is
buffered (owned_slots.py): it is digested in memory, and written after the coordinator has chosen its step.

Each owned slot has a note in the same tmpfs (slot_notes.py). A sidecar that restarts during step 2 reads
it and finishes the save.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from holdfast_core.errors import FormatError, HoldfastError, RefusedError
from holdfast_core.failpoint import failpoint
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import RankBuffered, Refusal, Stage, Staged
from holdfast_core.pacing.background_limit import BackgroundLimit
from holdfast_core.shm.slot_file import SlotFile, list_slots, rank_of_slot
from holdfast_core.shm.slot_header import SlotState
from holdfast_core.shm.slot_save import check_slot
from holdfast_core.tiers.base import ShardRecord
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import RoundState, fence
from holdfast_sidecar.base.signals import Signal
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.layouts import RankLayouts
from holdfast_sidecar.save.owned_slots import (
    OwnedSlot,
    Where,
    buffered_of,
    is_quiet,
    next_write,
    to_seal,
)
from holdfast_sidecar.save.repeated import RepeatedSaves
from holdfast_sidecar.save.room import Room
from holdfast_sidecar.save.slot_notes import SlotNotes, left_in_memory, take_or_free
from holdfast_sidecar.save.slot_writes import Outcome, SlotWrites


class Stager:
    """Owner of the slots from Stage until they are freed.

    All methods and the two signals run on the event loop.
    """

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        telemetry: Telemetry,
        layouts: RankLayouts,
        background: BackgroundLimit,
    ) -> None:
        self._pod = pod
        self._settings = pod.settings
        self._tiers = tiers
        self._layouts = layouts
        self.room = Room()
        self._writes = SlotWrites(pod, tiers, telemetry, self.room)
        self._metrics = telemetry.metrics
        self._background = background
        self.ended: Signal[[Outcome]] = Signal()
        """Called with the result of each save."""
        self.buffered_changed: Signal[[]] = Signal()
        """Called when `buffered` may have changed."""
        self._notes = SlotNotes(pod.settings.staged_dir)
        self._owned: dict[str, OwnedSlot] = {}
        self._staging: dict[Stage, asyncio.Future[Staged]] = {}
        """Requests that are being served."""
        self._repeated = RepeatedSaves(pod, tiers, self._owned)
        self._stored: dict[tuple[Rank, Step], ShardRecord] = {}
        """Shards that were buffered and are durable now, until the coordinator has acknowledged that."""
        self._newest: dict[Rank, Step] = {}
        self._reported: tuple[RankBuffered, ...] | None = None
        """The last BUFFERED that the coordinator acknowledged; None if it has no entry of this worker."""
        self._chosen: Step | None = None
        self._accepted_round: RoundState | None = None
        """The round whose ROUND this process has accepted. None while sealed: only `write_buffered` begins
        writes then."""
        self._tasks = Tasks()
        self.coordinator_epoch = 0
        """Number of coordinator changes. A message that was sent before a change is not recorded as
        acknowledged after it."""
        self.has_coordinator = False
        """Whether the coordinator of the round has replied to a report of this worker."""
        self.memory: dict[str, ShardRecord] = {}
        """By slot name: the durable shard whose bytes the slot holds, as long as its header agrees."""

    @property
    def idle(self) -> bool:
        """Whether nothing has to be done now, apart from buffered slots whose step is not committed.

        No slot is being digested or written. Every buffered slot of a committed step is written, has failed
        or is pruned. The coordinator has acknowledged the present `buffered`.
        """
        busy = any(
            o.where is not Where.BUFFERED or (o.committed and o.pending_write)
            for o in self._owned.values()
        )
        now = self.buffered()
        is_reported = is_quiet(now) or now == self._reported
        return not busy and is_reported

    @property
    def waiting(self) -> bool:
        """Whether a slot has still to be written and its write has not begun."""
        return any(o.pending_write for o in self._owned.values())

    def owns(self, slot: str) -> bool:
        return slot in self._owned

    def buffered_steps(self, rank: Rank) -> tuple[Step, ...]:
        """Return the rank's steps that are digested in memory, whether or not a write has begun."""
        return tuple(
            o.stage.step
            for o in self._owned.values()
            if o.stage.rank == rank and o.record is not None and not o.dropped
        )

    def newest(self, rank: Rank) -> Step | None:
        """Return the step that the rank staged last in this round."""
        return self._newest.get(rank)

    def under_way(self, rank: Rank) -> tuple[Step, ...]:
        """Return the rank's steps of the current round that are neither durable nor failed nor pruned."""
        state = self._accepted_round
        return tuple(
            o.stage.step
            for o in self._owned.values()
            if o.stage.rank == rank
            and state is not None
            and o.stage.round == state.round
            and not (o.dropped or o.failed)
        )

    def find(self, rank: Rank, checkpoint: CheckpointId) -> ShardRecord | None:
        """Return the record of the checkpoint's shard in memory, if it is digested and not pruned."""
        for owned in self._owned.values():
            if (owned.stage.rank, owned.checkpoint) == (rank, checkpoint) and not owned.dropped:
                return owned.record
        return None

    def may_find(self, rank: Rank, checkpoint: CheckpointId) -> bool:
        """Return whether `find` may return a record later, although it returns None now.

        This is so while the shard is not digested yet, and before `recover` has looked at the slots.
        """
        return self._accepted_round is None or any(
            (o.stage.rank, o.checkpoint) == (rank, checkpoint)
            and o.record is None
            and not o.dropped
            for o in self._owned.values()
        )

    async def stage(self, current: Callable[[], RoundState], message: Stage) -> Staged:
        """Take ownership of a full slot and begin to write or digest it. If it raises, the slot is unchanged.

        A rank sends the message again after a reconnect. While the first request is being served, both have
        its result. While the slot is owned, the message has no effect. If the rank has saved the step before
        in this round, the slot's bytes are compared with those of that save, and the slot is freed.

        Args:
            current: Returns the present round. It is called again after each wait.
            message: What the rank sent.

        Raises:
            RefusedError: The round does not match or is sealed, the slot is owned (BUSY), or the step was
                saved before with other bytes (CONFLICT).
            FormatError: The slot is not of a rank of this pod, or its header contradicts the message.
            HoldfastError: The layout cannot be stored, the slot not opened, or its note not written.
        """
        expect_of_round(current(), message)
        staging = self._staging.get(message)
        if staging is None:
            if self._is_owned(message):
                return Staged(message.step)
            staging = asyncio.ensure_future(self._stage(current, message))
            self._staging[message] = staging
            staging.add_done_callback(lambda done: self._staging_ended(message, done))
        # A comparison frees the slot, so that it must not end with the connection.
        return await asyncio.shield(staging)

    def _staging_ended(self, message: Stage, done: asyncio.Future[Staged]) -> None:
        del self._staging[message]
        if not done.cancelled():
            done.exception()  # if no request waits any more, asyncio would warn

    async def _stage(self, current: Callable[[], RoundState], message: Stage) -> Staged:
        await self._layouts.ensure(message.layout)
        expect_of_round(current(), message)  # a SEAL may have arrived while the layout was read
        if await self._repeated.compare(lambda: expect_of_round(current(), message), message):
            return Staged(message.step)
        state = expect_of_round(current(), message)
        slot = SlotFile.open(self._settings.slots_dir, message.slot)
        try:
            check_slot(slot.header(), message, SlotState.FULL)
            if message.slot in self._owned:
                raise RefusedError(Refusal.BUSY, f"slot {message.slot} is being written")
            self._notes.write(message)
            self.memory.pop(slot.name, None)
            slot.set_state(SlotState.OWNED)
        except BaseException:
            slot.close()
            raise
        pending_write = self._may_buffer(state) and any(
            o.stage.rank == message.rank and (o.where is Where.WRITING or not o.dropped)
            for o in self._owned.values()
        )
        self._take(slot, message, state, pending_write=pending_write)
        return Staged(message.step)

    # ------------------------------------------------------------------ buffered slots

    def buffered(self) -> tuple[RankBuffered, ...]:
        """Return what BUFFERED reports of each rank of this pod, or nothing while sealed."""
        state = self._accepted_round
        if state is None:
            return ()
        return tuple(
            buffered_of(Rank(rank), state.round, self._owned.values(), self._stored.values())
            for rank in state.own_ranks
        )

    @property
    def unreported(self) -> tuple[RankBuffered, ...] | None:
        """`buffered`, or None if the coordinator has acknowledged it or there is nothing to report."""
        now = self.buffered()
        return None if now == self._reported or (is_quiet(now) and self._reported is None) else now

    def mark_reported(self, buffered: tuple[RankBuffered, ...]) -> None:
        """Record that the coordinator has acknowledged `buffered`."""
        known: list[RankBuffered] = []
        for entry in buffered:
            for shard in entry.shards:
                if shard.stored:
                    self._stored.pop((entry.rank, shard.step), None)
            known.append(replace(entry, shards=tuple(s for s in entry.shards if not s.stored)))
        self._reported = None if is_quiet(known) else tuple(known)
        self.buffered_changed()

    def coordinator_changed(self) -> None:
        """Report everything again, because another coordinator, or a restarted one, has received nothing.

        Sending starts when the coordinator has replied to a report.
        """
        self._reported = None
        self.coordinator_epoch += 1
        self.has_coordinator = False

    def coordinator_replied(self) -> None:
        """Record that the coordinator of this round has replied, and so accepts this worker's messages."""
        if not self.has_coordinator:
            self.has_coordinator = True
            self.buffered_changed()

    def choose(self, step: Step | None) -> None:
        """Set the step that the coordinator has chosen. Every rank that buffers it writes it."""
        self._chosen = step
        self._advance()

    @property
    def chosen(self) -> Step | None:
        return self._chosen

    @property
    def dropped(self) -> frozenset[Step]:
        """Pruned steps whose slots are not freed yet."""
        return frozenset(o.stage.step for o in self._owned.values() if o.dropped)

    def committed(self, step: Step, round_: RestartRound) -> None:
        """Record that the step's manifest is on this node."""
        for owned in self._owned.values():
            if owned.checkpoint == CheckpointId(step, round_):
                owned.committed = True

    def forget(self, steps: frozenset[Step]) -> None:
        """Mark the slots of pruned steps as dropped.

        A buffered slot is freed by `release`, because a step's manifest is deleted before its bytes. A slot
        that is being written finishes first; its shard is then deleted.
        """
        for owned in self._owned.values():
            if owned.stage.step in steps:
                owned.dropped = True
        self._stored = {k: r for k, r in self._stored.items() if k[1] not in steps}

    def release(self, steps: frozenset[Step]) -> None:
        """Free the buffered slots of these dropped steps. Call it after their manifests are deleted."""
        dropped = [
            o
            for o in self._owned.values()
            if o.dropped and o.where is Where.BUFFERED and o.stage.step in steps
        ]
        for owned in dropped:
            self._free(owned)
        self._metrics.dropped(len({o.stage.step for o in dropped}))
        self.buffered_changed()

    # ------------------------------------------------------------------ rounds

    def seal(self) -> None:
        """End the round: from now on only `write_buffered` begins writes of buffered slots."""
        self._accepted_round = None
        self._chosen = None
        self.room.close()

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait for all digests and writes under way. Return False if the time ran out."""
        return await self._tasks.join(timeout_seconds)

    async def write_buffered(
        self, manifests: frozenset[CheckpointId], timeout_seconds: float
    ) -> bool:
        """Write the buffered slots of committed steps while sealed, so that the inventory lists their shards.

        Slots of steps without a manifest stay in memory, because such a step cannot be a restore point.

        Returns:
            False if the time ran out.
        """
        deadline = self._pod.clock.monotonic() + timeout_seconds
        await self.take_left(manifests)
        waiting = to_seal(self._owned.values(), manifests)
        for step in sorted({o.stage.step for o in waiting}):
            for owned in waiting:
                if owned.stage.step == step:
                    self._start(owned)
            if not await self._tasks.join(max(0.0, deadline - self._pod.clock.monotonic())):
                return False
        return True

    async def take_left(self, manifests: frozenset[CheckpointId]) -> bool:
        """Take over slots of committed steps that an earlier process of this sidecar owned.

        A seal calls this, since the sidecar may have restarted after the ROUND. Returns whether
        `write_buffered` has anything to write.
        """
        left = await self._tiers.pools.read.run(
            left_in_memory,
            self._settings.slots_dir,
            self._notes,
            self._tiers.node,
            self._settings.contract.job_uid,
            manifests,
            known=frozenset(self._owned),
        )
        for found in left:
            if found.stage.slot not in self._owned:
                slot = SlotFile.open(self._settings.slots_dir, found.stage.slot)
                owned = OwnedSlot(
                    found.stage, slot, found.world_size, Where.BUFFERED, was_buffered=True
                )
                self._owned[slot.name] = owned
        return bool(to_seal(self._owned.values(), manifests))

    def recover(self, state: RoundState, manifests: frozenset[CheckpointId] = frozenset()) -> None:
        """Begin a round, after its ROUND was accepted.

        Slots that an earlier process of this sidecar owned in this round are taken over. Buffered slots of
        older rounds, and slots that no other process would free, are freed.

        Args:
            state: The state of the round.
            manifests: Checkpoints whose manifest is on this node.
        """
        self._accepted_round = state
        self.room.open()
        self._chosen = self._reported = None
        self.has_coordinator = False
        self._stored.clear()
        self._newest.clear()
        for owned in tuple(self._owned.values()):
            # A write of an older round that is still under way finishes: it may be of the restore point.
            if owned.stage.round != state.round and owned.where is not Where.WRITING:
                owned.dropped = True
            if owned.dropped and owned.where is Where.BUFFERED:
                self._free(owned)
        for name in list_slots(self._settings.slots_dir):
            if self.owns(name):
                continue
            try:
                slot = SlotFile.open(self._settings.slots_dir, name)
            except HoldfastError as error:
                logs.warning("recovering a slot failed", slot=name, error=str(error))
                continue
            try:
                message = take_or_free(slot, self._notes, state.round)
            except (HoldfastError, OSError) as error:
                logs.warning("recovering a slot failed", slot=name, error=str(error))
                message = None
            if message is None:
                slot.close()
            else:
                # Even a slot whose write was interrupted is buffered: the coordinator chooses what is next.
                self._take(slot, message, state, pending_write=self._may_buffer(state))
        for owned in self._owned.values():
            owned.committed = owned.checkpoint in manifests

    # ------------------------------------------------------------------ inside

    def _is_owned(self, message: Stage) -> bool:
        """Return whether this very message was accepted before. A rank sends it again after a reconnect."""
        owned = self._owned.get(message.slot)
        return owned is not None and owned.stage == message

    def _may_buffer(self, state: RoundState) -> bool:
        return state.accepted is not None and state.accepted.policy.memory_level_enabled

    def _take(
        self, slot: SlotFile, message: Stage, state: RoundState, *, pending_write: bool
    ) -> None:
        """Add an owned slot, and begin its digest if it `pending_write`, else its write."""
        slot.throttle = self._background.take
        where = Where.DIGESTING if pending_write else Where.WRITING
        owned = OwnedSlot(message, slot, state.world_size, where, was_buffered=pending_write)
        self._owned[message.slot] = owned
        self._newest[message.rank] = message.step
        if owned.where is Where.DIGESTING:
            self._tasks.spawn(self._digest(owned), f"digest {message.slot}")
        else:
            self._start(owned)
        self.buffered_changed()

    def _start(self, owned: OwnedSlot) -> None:
        owned.where = Where.WRITING
        self._tasks.spawn(self._write(owned), f"write {owned.stage.slot}")

    def _advance(self) -> None:
        """Start the writes of buffered slots that may start now."""
        state = self._accepted_round
        if state is None:
            return
        for rank in state.own_ranks:
            owned = next_write(Rank(rank), self._owned.values(), self._chosen)
            if owned is not None:
                self._start(owned)
        self.buffered_changed()

    def _free(self, owned: OwnedSlot) -> None:
        """Remove the slot's note and set the slot FREE, in this order.

        If the process ends in between, the next one finds an OWNED slot without a note and frees it.
        """
        name = owned.stage.slot
        self._owned.pop(name, None)
        owned.digested.set()
        self._notes.remove(name)
        failpoint("memory.before_free")
        try:
            owned.slot.free()
        except HoldfastError as error:
            # The trainer can cause this at any time, and an unhandled error of a task ends the process.
            logs.warning("freeing a slot failed", slot=name, error=str(error))

    async def _digest(self, owned: OwnedSlot) -> None:
        outcome = await self._writes.digest(owned)
        record = outcome.record
        owned.record, owned.where = record, Where.BUFFERED
        owned.digested.set()
        is_done = outcome.failed is not None
        if (
            record is not None
            and not owned.dropped
            and self._tiers.node.find(record.ref) is not None
        ):
            is_done = True  # an earlier process wrote it and ended before it freed the slot
            self._is_stored(owned, record)
        if is_done or owned.dropped:
            self._free(owned)
        if is_done:
            self.ended(outcome)
        self._advance()

    async def _write(self, owned: OwnedSlot) -> None:
        outcome: Outcome | None = None
        try:
            outcome = await self._writes.write(owned)
        finally:
            record = None if outcome is None else outcome.record
            if outcome is not None and outcome.failed is not None and self._stays(owned, outcome):
                owned.where, owned.failed = Where.BUFFERED, True
            else:
                if record is not None and not owned.dropped:
                    self._is_stored(owned, record)
                self._free(owned)
        if record is not None and owned.dropped:
            await self._writes.delete(record)
        else:
            self.ended(outcome)
        self._advance()

    def _is_stored(self, owned: OwnedSlot, record: ShardRecord) -> None:
        self.memory[owned.stage.slot] = record
        if owned.was_buffered:
            self._stored[(record.header.rank, record.header.step)] = record

    def _stays(self, owned: OwnedSlot, outcome: Outcome) -> bool:
        """Return whether a slot whose write failed is buffered again instead of freed.

        It is if its bytes are still the digested ones, its step is not pruned and its round is not over.
        """
        state = self._accepted_round
        current = state is None or state.round == owned.stage.round
        return owned.record is not None and not owned.dropped and not outcome.is_corrupt and current


def expect_of_round(state: RoundState, message: Stage) -> RoundState:
    """Return `state` if the message is of its round and of a rank of this pod.

    Raises RefusedError, FormatError.
    """
    refused = fence(state, message.round)
    if refused is not None:
        raise RefusedError(refused.code, refused.message)
    if rank_of_slot(message.slot) != message.rank or message.rank not in state.own_ranks:
        raise FormatError(
            f"stage of rank {message.rank} in slot {message.slot!r}: the rank does not run in "
            "this pod"
        )
    return state
