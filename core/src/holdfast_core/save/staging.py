"""Turn full slots into durable shards, in a pod and in a folder. What differs is in place.py.

1. The rank sends Stage. The slot's header must agree with the message. The stager then owns the slot and
   replies; from then on the slot's bytes do not change.
2. A thread digests and writes the slot in one pass (`digest_slot`).
3. The slot becomes free, and `ended` passes the shard on to its commit.

If step 2 fails, the failure is reported, the slot is freed, and training continues.

A step that is staged while an earlier one is being written may wait in its slot. In a pod this needs three
slots or more, and the step is written only after the coordinator has chosen it for all ranks (ADR 0018), or
by a seal. In a folder the steps are written in their order.

In a pod each owned slot has a note in the same tmpfs (slots.py). A sidecar that restarts during step 2
reads it and finishes the save. The rank of a folder hands the slot over again.

A step that a rank saves again in the same round is not written but compared with its earlier save. Levels and
failures name only the step. A rank may rely on them for the second save only if both saves have the same
bytes, and the shard of the first one is the only one that can be committed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast_core.clock import Clock
from holdfast_core.errors import CapacityError, FormatError, HoldfastError, RefusedError, TierError
from holdfast_core.ids import CheckpointId, Rank, Step
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import Refusal, Stage, StepOutcome
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.save.place import (
    OwnedSlot,
    SavePlace,
    SavePools,
    SaveReports,
    SaveRound,
    SlotNote,
    Where,
    check_slot,
    digest_slot,
    left_in_slots,
    next_write,
    saved_before,
    shard_header,
    take_or_free,
    to_seal,
)
from holdfast_core.shards.file import ShardRecord
from holdfast_core.shm.slot_file import SlotFile, SlotState, list_slots, rank_of_slot
from holdfast_core.tasks import Signal, Tasks, until_done


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """Result of a write: the shard's record, or the failure that the rank is sent."""

    stage: Stage
    record: ShardRecord | None
    failed: StepOutcome | None = None


class Room:
    """Signal that space was freed where shards are written, for use on the event loop.

    It is closed while the sidecar is sealed, because nothing is deleted then.
    """

    def __init__(self) -> None:
        self._made = asyncio.Event()
        self._is_open = True

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Let all present waits return False, and later ones until `open`."""
        self._is_open = False
        self._wake()

    def made(self) -> None:
        """Wake all waits after a deletion."""
        self._wake()

    async def wait(self, seconds: float) -> bool:
        """Wait for a deletion. Return False if there is none within `seconds` or the sidecar is sealed."""
        if not self._is_open:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._made.wait()
        except TimeoutError:
            return False
        return self._is_open

    def _wake(self) -> None:
        made, self._made = self._made, asyncio.Event()
        made.set()


class SlotWrites:
    """Runner of writes. An error is reported and is part of the WriteOutcome."""

    def __init__(
        self, place: SavePlace, pools: SavePools, reports: SaveReports, clock: Clock
    ) -> None:
        self._place = place
        self._pools = pools
        self._reports = reports
        self._clock = clock
        self.room = Room()

    async def write(self, owned: OwnedSlot) -> WriteOutcome:
        """Write the slot to its place, durably."""
        started = self._clock.monotonic()
        try:
            record = await self._with_room(owned)
        except Exception as error:  # noqa: BLE001 - else the slot stays owned and nothing reports it
            return WriteOutcome(owned.stage, None, self._reports.failed(owned.stage, error))
        seconds = self._clock.monotonic() - started
        self._reports.stored(owned.stage, record.header.payload_bytes, seconds)
        return WriteOutcome(owned.stage, record)

    async def _with_room(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard. In a full place, retry after each deletion for up to `room_seconds`.

        In a pod, this worker's report carries the failure meanwhile, upon which the coordinator prunes
        steps that the job does not need. Raises CapacityError if the room does not suffice in time.
        """
        deadline: float | None = None
        while True:
            try:
                return await self._watched(owned)
            except CapacityError as error:
                self._reports.no_room(owned.stage, error)
                now = self._clock.monotonic()
                if deadline is None:
                    deadline = now + self._place.room_seconds
                if now >= deadline or not await self.room.wait(deadline - now):
                    raise
                # The next write may take long. If this failure stayed, the coordinator would continue to
                # prune during it.
                self._reports.continues(owned.stage)

    async def _watched(self, owned: OwnedSlot) -> ShardRecord:
        """Write the shard, and report a failure as long as the disk hangs."""
        slot = owned.slot
        header = shard_header(owned.stage, self._place.job_uid, owned.world_size)
        slot.bytes_read = slot.bytes_verified = 0  # an earlier attempt may have increased them

        has_begun = threading.Event()

        def write() -> ShardRecord:
            has_begun.set()
            return self._place.write_shard(header, slot)

        def stalled(quiet: float) -> None:
            if not has_begun.is_set():
                return  # the write waits for those of other ranks, which are watched themselves
            self._reports.hangs(
                owned.stage,
                f"step {header.step}: {slot.bytes_read} of {header.payload_bytes} bytes were "
                f"written and {slot.bytes_verified} of them read back, and none for {quiet:.0f} s: the "
                "disk hangs or is far too slow. Training continues, and saves are skipped while no slot "
                "is free. Check the disk",
            )

        return await until_done(
            self._pools.shard.run(write),
            lambda: slot.bytes_read + slot.bytes_verified,
            quiet_seconds=self._place.disk_quiet_seconds,
            stalled=stalled,
            moving=lambda: self._reports.continues(owned.stage),
        )


class RepeatedSaves:
    """Comparisons of repeated saves, on the event loop. `owned` are the slots that the stager owns."""

    def __init__(
        self, place: SavePlace, pools: SavePools, owned: Mapping[tuple[int, int], OwnedSlot]
    ) -> None:
        self._place = place
        self._pools = pools
        self._owned = owned

    async def compare(self, check: Callable[[], object], message: Stage) -> bool:
        """Return whether the rank has saved the step before. The slot is then FREE again.

        Args:
            check: Raises RefusedError if the round of the message has ended. Called after each wait.
            message: The Stage of a slot that the stager does not own. There is one call for it at a time.

        Raises:
            RefusedError: The earlier save has other bytes (CONFLICT), or `check` raised.
            FormatError: The slot's header contradicts the message.
        """
        earlier = self._earlier(message)
        while isinstance(earlier, OwnedSlot):
            record = await self._digested(earlier)
            check()
            earlier = record or self._earlier(message)
        if earlier is None:
            return False  # the earlier save has failed: this one is the first that can be durable
        slot = self._place.open_slot(message.slot)
        try:
            check_slot(slot.header(), message, *self._place.staged_states)
            kept = earlier.header
            header = shard_header(message, kept.job_uid, kept.world_size)
            found = await self._pools.digest.run(digest_slot, header, slot)
            check()
            check_slot(slot.header(), message, *self._place.staged_states)
            if found != earlier:
                raise saved_before(message, f"{kept.payload_bytes} bytes with {earlier.blake3}")
            slot.set_state(SlotState.FREE)
        finally:
            slot.close()
        return True

    async def _digested(self, owned: OwnedSlot) -> ShardRecord | None:
        """Return the record of a waiting slot. None once the slot is freed, and its bytes are gone."""
        if owned.where is Where.WAITING:
            slot = owned.slot.duplicate()
            header = shard_header(owned.stage, self._place.job_uid, owned.world_size)
            try:
                record = await self._pools.digest.run(digest_slot, header, slot)
            finally:
                slot.close()
            return None if owned.freed.is_set() else record
        await owned.freed.wait()
        return None

    def _earlier(self, message: Stage) -> OwnedSlot | ShardRecord | None:
        """Return the record of the earlier save, its slot if that is not durable yet, or None."""
        checkpoint = CheckpointId(message.step, message.round)
        for owned in self._owned.values():
            if (owned.stage.rank, owned.checkpoint) == (message.rank, checkpoint):
                return owned
        job_uid = self._place.job_uid
        for record in self._place.list_shards():
            found = (record.header.job_uid, record.header.rank, record.checkpoint)
            if found == (job_uid, message.rank, checkpoint):
                return record
        return None


_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Round:
    """What the stager knows of a round."""

    accepted: SaveRound | None = None
    """The round whose ROUND this process has accepted. None while sealed: only `write_waiting` begins
    writes then."""
    newest: dict[Rank, Step] = field(default_factory=dict)
    """The step that each rank has staged last in this round."""
    chosen: Step | None = None
    """The step that was chosen to be written."""


_MOST_OF_A_NAME = 3
"""Largest number of files of one name that the stager owns. When its state has grown, or after a restart, a
rank replaces slot files from which shards are still being written. A trainer that does so endlessly must not
take all descriptors."""


def _names(owned: Iterable[OwnedSlot]) -> frozenset[str]:
    """Return the names that these files have, or had: a rank may have replaced a file."""
    return frozenset(o.stage.slot for o in owned)


class Stager:
    """Owner of the slots from Stage until they are freed.

    All methods and the two signals run on the event loop.
    """

    def __init__(
        self,
        place: SavePlace,
        pools: SavePools,
        reports: SaveReports,
        background: BackgroundLimit,
        clock: Clock,
    ) -> None:
        self._place = place
        self._pools = pools
        self._clock = clock
        self.slot_writes = SlotWrites(place, pools, reports, clock)
        self._reports = reports
        self._background = background
        self.ended: Signal[[WriteOutcome]] = Signal()
        """Called with the result of each save."""
        self.changed: Signal[[]] = Signal()
        """Called when the slots that the stager owns have changed."""
        self._owned: dict[tuple[int, int], OwnedSlot] = {}
        """By `SlotFile.identity`."""
        self._staging: dict[Stage, asyncio.Future[None]] = {}
        """Requests that are being served."""
        self._repeated = RepeatedSaves(place, pools, self._owned)
        self._round = _Round()
        self._tasks = Tasks()
        self.memory: dict[str, ShardRecord] = {}
        """By slot name: the durable shard whose bytes the slot holds, as long as its header agrees."""

    @property
    def idle(self) -> bool:
        """Whether no slot is being written. A slot may wait for other ranks to hand its step over."""
        return not any(o.where is Where.WRITING for o in self._owned.values())

    @property
    def waits(self) -> bool:
        """Whether a slot has still to be written and its write has not begun."""
        return any(o.where is Where.WAITING for o in self._owned.values())

    def owns(self, slot: SlotFile) -> bool:
        """Return whether this file is owned. Other threads may call it, too."""
        return slot.identity in self._owned

    def waiting(self, rank: Rank) -> tuple[Step, ...]:
        """Return the rank's steps of the current round that wait in slots, oldest first."""
        return tuple(
            sorted(
                o.stage.step
                for o in self._owned.values()
                if o.stage.rank == rank and o.where is Where.WAITING and self._is_current(o)
            )
        )

    def writes(self, rank: Rank) -> bool:
        """Return whether a slot of the rank is being written, of this round or of an older one."""
        return any(o.stage.rank == rank and o.where is Where.WRITING for o in self._owned.values())

    def newest(self, rank: Rank) -> Step | None:
        """Return the step that the rank staged last in this round."""
        return self._round.newest.get(rank)

    def under_way(self, rank: Rank) -> tuple[Step, ...]:
        """Return the rank's steps of the current round that are neither durable nor failed nor pruned."""
        return tuple(
            o.stage.step
            for o in self._owned.values()
            if o.stage.rank == rank and self._is_current(o) and not o.dropped
        )

    def _is_current(self, owned: OwnedSlot) -> bool:
        state = self._round.accepted
        return state is not None and owned.stage.round == state.round

    async def stage(self, current: Callable[[], SaveRound], message: Stage) -> None:
        """Take ownership of a full slot, and begin to write it unless it waits.

        If this raises, the slot is unchanged.

        A rank sends the message again after a reconnect. While the first request is being served, both have
        its result. While the slot is owned, the message has no effect, and neither has it if the slot is
        gone and its save is stored. If the rank has saved the step before in this round, the slot's bytes
        are compared with those of that save, and the slot is freed.

        Args:
            current: Returns the present round. It is called again after each wait.
            message: What the rank sent.

        Raises:
            StaleRoundError, RefusedError: The round does not match or is sealed, the slot is owned (BUSY), or
                the step was saved before with other bytes (CONFLICT).
            FormatError: The slot is not of a rank of this pod, or its header contradicts the message.
            HoldfastError: The layout cannot be stored, the slot not opened, or its note not written.
        """
        expect_of_round(current(), message)
        staging = self._staging.get(message)
        if staging is None:
            if any(o.stage == message for o in self._owned.values()):  # the rank connected again
                return
            staging = asyncio.ensure_future(self._stage(current, message))
            self._staging[message] = staging
            staging.add_done_callback(lambda done: self._staging_ended(message, done))
        try:
            # A comparison frees the slot, so that it must not end with the connection.
            await asyncio.shield(staging)
        except (FormatError, TierError):
            # An earlier process may have written the save, and ended before it reported that. The slot, and
            # the layout beside it, may be those of another save by now.
            if not await self._pools.meta.run(self._place.has_stored, message):
                raise

    def _staging_ended(self, message: Stage, done: asyncio.Future[None]) -> None:
        del self._staging[message]
        if not done.cancelled():
            done.exception()  # if no request waits any more, asyncio would warn

    async def _stage(self, current: Callable[[], SaveRound], message: Stage) -> None:
        await self._place.ensure_layout(message)
        expect_of_round(current(), message)  # a SEAL may have arrived while the layout was read
        if await self._repeated.compare(lambda: expect_of_round(current(), message), message):
            return
        state = expect_of_round(current(), message)
        slot = self._place.open_slot(message.slot)
        try:
            check_slot(slot.header(), message, *self._place.staged_states)
            of_name = sum(o.stage.slot == message.slot for o in self._owned.values())
            if slot.identity in self._owned or of_name >= _MOST_OF_A_NAME:
                raise RefusedError(Refusal.BUSY, f"slot {message.slot} is being written")
            if self._place.notes is not None:
                self._place.notes.write(SlotNote(message, state.world_size))
            self.memory.pop(slot.name, None)
            slot.set_state(SlotState.OWNED)
        except BaseException:
            slot.close()
            raise
        waits = state.waits_for_choice and any(
            o.stage.rank == message.rank for o in self._owned.values()
        )
        self._take(slot, message, state, waits=waits)

    # ------------------------------------------------------------------ waiting slots

    def choose(self, step: Step | None) -> None:
        """Set the step that may be written next. Every rank in whose slot it waits writes it."""
        self._round.chosen = step
        self._advance()

    def forget(self, steps: frozenset[Step]) -> None:
        """Free the slots of pruned steps.

        A slot that is being written finishes first. Whoever receives `ended` then deletes its shard.
        """
        found = [o for o in self._owned.values() if o.stage.step in steps]
        waiting = [o for o in found if o.where is Where.WAITING]
        for owned in found:
            owned.dropped = True
        for owned in waiting:
            self._free(owned)
        self._reports.dropped(len({o.stage.step for o in waiting}))
        self.changed()

    # ------------------------------------------------------------------ rounds

    def seal(self) -> None:
        """End the round: from now on only `write_waiting` begins writes."""
        self._round = _Round()
        self.slot_writes.room.close()

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait for all writes under way. Return False if the time ran out."""
        return await self._tasks.join(timeout_seconds)

    async def write_waiting(self, timeout_seconds: float) -> bool:
        """Write the waiting slots while sealed, so that the inventory lists their shards.

        Returns:
            False if the time ran out.
        """
        deadline = self._clock.monotonic() + timeout_seconds
        await self.take_left()
        waiting = to_seal(self._owned.values())
        for checkpoint in sorted({o.checkpoint for o in waiting}):
            for owned in waiting:
                if owned.checkpoint == checkpoint:
                    self._start(owned)
            if not await self._tasks.join(max(0.0, deadline - self._clock.monotonic())):
                return False
        return True

    async def take_left(self) -> bool:
        """Take over slots that an earlier process of this sidecar owned.

        A seal calls this, since the sidecar may have restarted after the ROUND. Returns whether
        `write_waiting` has anything to write.
        """
        notes, slots_dir = self._place.notes, self._place.slots_dir
        left: tuple[SlotNote, ...] = ()
        if notes is not None:
            left = await self._pools.read.run(
                left_in_slots,
                slots_dir,
                notes,
                known=_names(self._owned.values()),
            )
        for note in left:
            name = note.stage.slot
            if name not in _names(self._owned.values()):
                slot = self._place.open_slot(name)
                owned = OwnedSlot(note.stage, slot, note.world_size, Where.WAITING)
                self._owned[slot.identity] = owned
        return bool(to_seal(self._owned.values()))

    def abandon(self) -> None:
        """Close the waiting slots and leave them OWNED, as the end of the process does."""
        for owned in self._owned.values():
            if owned.where is Where.WAITING:
                owned.slot.close()

    def recover(
        self, state: SaveRound, durable: frozenset[tuple[Rank, Step]] = frozenset()
    ) -> None:
        """Begin a round, after its ROUND was accepted.

        Slots that an earlier process of this sidecar owned in this round are taken over. Waiting slots of
        older rounds, and slots that no other process would free, are freed.

        Args:
            state: The state of the round.
            durable: Own shards of this round that are on the node tier. A slot that still holds one is
                written at once, which ends fast: the process that wrote it ended before it freed the slot.
        """
        # What ranks have staged, and the plan has chosen, since the ROUND was accepted stays.
        self._round.accepted = state
        self.slot_writes.room.open()
        for owned in tuple(self._owned.values()):
            # A write of an older round that is still under way finishes: it may be of the restore point.
            if not self._is_current(owned) and owned.where is Where.WAITING:
                self._free(owned)
        notes = self._place.notes
        if notes is None:
            return
        for name in list_slots(self._place.slots_dir):
            if name in _names(self._owned.values()):
                continue
            try:
                slot = self._place.open_slot(name)
            except HoldfastError as error:
                _LOG.warning("recovering slot %s failed: %s", name, error)
                continue
            try:
                message = take_or_free(slot, notes, state.round)
            except (HoldfastError, OSError) as error:
                _LOG.warning("recovering slot %s failed: %s", name, error)
                message = None
            if message is None:
                slot.close()
            else:
                # Even a slot whose write was interrupted waits: the coordinator chooses what is next.
                waits = state.waits_for_choice and (message.rank, message.step) not in durable
                self._take(slot, message, state, waits=waits)
        self._advance()

    # ------------------------------------------------------------------ inside

    def _take(self, slot: SlotFile, message: Stage, state: SaveRound, *, waits: bool) -> None:
        """Add an owned slot, and begin its write unless it waits."""
        slot.throttle = self._background.take
        owned = OwnedSlot(message, slot, state.world_size, Where.WAITING)
        self._owned[slot.identity] = owned
        self._round.newest[message.rank] = message.step
        if not waits:
            self._start(owned)
        self.changed()

    def _start(self, owned: OwnedSlot) -> None:
        owned.where = Where.WRITING
        self._tasks.spawn(self._write(owned), f"write {owned.stage.slot}")

    def _advance(self) -> None:
        """Start the writes of waiting slots that may start now."""
        state = self._round.accepted
        if state is None:
            return
        for rank in state.own_ranks:
            owned = next_write(Rank(rank), self._owned.values(), self._round.chosen)
            if owned is not None:
                self._start(owned)
        self.changed()

    def _free(self, owned: OwnedSlot) -> None:
        """Remove the slot's note and set the slot FREE, in this order.

        If the process ends in between, the next one finds an OWNED slot without a note and frees it.
        """
        name = owned.stage.slot
        self._owned.pop(owned.slot.identity, None)
        owned.freed.set()
        # The note of a name is that of its newest file. No process could find an older one again.
        if self._place.notes is not None and name not in _names(self._owned.values()):
            self._place.notes.remove(name)
        sys.audit("holdfast.memory.before_free")
        try:
            owned.slot.free()
        except HoldfastError as error:
            # The trainer can cause this at any time, and an unhandled error of a task ends the process.
            _LOG.warning("freeing slot %s failed: %s", name, error)

    async def _write(self, owned: OwnedSlot) -> None:
        outcome = await self.slot_writes.write(owned)
        record = outcome.record
        if record is not None and not owned.dropped:
            self.memory[owned.stage.slot] = record
        self._free(owned)
        self.ended(outcome)
        self._advance()


def expect_of_round(state: SaveRound, message: Stage) -> SaveRound:
    """Return `state` if the message is of its round and of a rank of this pod.

    Raises StaleRoundError, RefusedError, FormatError.
    """
    raise_refused(state.refusal(message.round))
    if rank_of_slot(message.slot) != message.rank or message.rank not in state.own_ranks:
        raise FormatError(
            f"stage of rank {message.rank} in slot {message.slot!r}: the rank does not run in "
            "this pod"
        )
    return state
