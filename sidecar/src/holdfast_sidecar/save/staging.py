"""From a full slot to a durable shard on the node tier.

1. Stage: the slot's header must say exactly what the message says; then the sidecar owns the slot
   and the rank gets `Staged`: from here on its bytes do not change.
2. One pass in a thread: digest and write. 3. The slot is free again, and the shard goes to `Flow`.
A failure of 2 is told to the rank and reported; it never fails a step, and the slot is freed.
Where the ring is large enough, a slot that is staged while the rank's earlier one is written waits in
memory (held.py): digested, and written when the coordinator has chosen its step.

What was staged is noted beside the slots (in the same tmpfs), so that a sidecar that restarts in
the middle of 2 finishes it instead of leaving the slot owned for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from holdfast_core.clock import Clock
from holdfast_core.errors import FormatError, HoldfastError, RefusedError
from holdfast_core.failpoint import failpoint
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import RankHolding, Refusal, Stage, Staged
from holdfast_core.pacing.background import Pacing
from holdfast_core.shm.slot_file import SlotFile, list_slots, rank_of_slot
from holdfast_core.shm.slot_header import SlotState
from holdfast_core.tiers.base import NodeTier, ShardRecord
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import RoundState, fence
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.save.held import (
    OwnedSlot,
    Where,
    holding_of,
    is_quiet,
    next_write,
    to_seal,
)
from holdfast_sidecar.save.layouts import RankLayouts
from holdfast_sidecar.save.room import Room
from holdfast_sidecar.save.slot_notes import SlotNotes, check_slot, left_in_memory, take_or_free
from holdfast_sidecar.save.slot_writes import Outcome, SlotWrites


class Stager:
    """Owns slots between Stage and durability. `on_outcome` hears each result, `on_held` that
    `holding` has changed; both on the loop."""

    def __init__(
        self,
        settings: Settings,
        node: NodeTier,
        layouts: RankLayouts,
        pools: Pools,
        failures: Failures,
        metrics: Metrics,
        clock: Clock,
        pacing: Pacing,
        on_outcome: Callable[[Outcome], None],
        on_held: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._node = node
        self._layouts = layouts
        self._pools = pools
        self.room = Room()
        self._writes = SlotWrites(settings, node, pools, failures, metrics, clock, self.room)
        self._metrics = metrics
        self._clock = clock
        self._pacing = pacing
        self._on_outcome = on_outcome
        self._on_held = on_held
        self._notes = SlotNotes(settings.staged_dir)
        self._owned: dict[str, OwnedSlot] = {}
        self._stored: dict[tuple[Rank, Step], ShardRecord] = {}
        """Waited in memory and are written, which the coordinator was not told yet."""
        self._newest: dict[Rank, Step] = {}
        self._told: tuple[RankHolding, ...] | None = None
        self._chosen: Step | None = None
        self._held_round: RoundState | None = None
        """None while sealed: nothing new is written."""
        self._tasks = Tasks()
        self.audience = 0
        """Counts the coordinators: what an earlier one was told does not count for the next."""
        self.has_coordinator = False
        """The coordinator of the round has replied to a report of this worker."""
        self.memory: dict[str, ShardRecord] = {}
        """Slots whose bytes are known to be those of a durable shard, while the header agrees."""

    @property
    def idle(self) -> bool:
        """Nothing is written or digested, and what waits can get no further, as far as was said."""
        busy = any(
            o.where is not Where.HELD or (o.committed and o.waits) for o in self._owned.values()
        )
        said = self.holding()
        is_told = is_quiet(said) or said == self._told
        return not busy and is_told

    @property
    def waiting(self) -> bool:
        """A step lies in memory only, and may still be written."""
        return any(o.waits for o in self._owned.values())

    def owns(self, slot: str) -> bool:
        return slot in self._owned

    def held_steps(self, rank: Rank) -> tuple[Step, ...]:
        """Digested in memory, written or not."""
        return tuple(
            o.stage.step
            for o in self._owned.values()
            if o.stage.rank == rank and o.record is not None and not o.dropped
        )

    def newest(self, rank: Rank) -> Step | None:
        """What the rank handed over last in this round."""
        return self._newest.get(rank)

    def under_way(self, rank: Rank) -> tuple[Step, ...]:
        """Handed over in the round that is held, and neither durable nor failed."""
        state = self._held_round
        return tuple(
            o.stage.step
            for o in self._owned.values()
            if o.stage.rank == rank
            and state is not None
            and o.stage.round == state.round
            and not (o.dropped or o.failed)
        )

    def find(self, rank: Rank, checkpoint: CheckpointId) -> ShardRecord | None:
        """The shard that waits in memory, if it is digested and wanted."""
        for owned in self._owned.values():
            if (owned.stage.rank, owned.checkpoint) == (rank, checkpoint) and not owned.dropped:
                return owned.record
        return None

    def may_find(self, rank: Rank, checkpoint: CheckpointId) -> bool:
        """`find` cannot say yet: it is being digested, or this process has not looked at its slots."""
        return self._held_round is None or any(
            (o.stage.rank, o.checkpoint) == (rank, checkpoint)
            and o.record is None
            and not o.dropped
            for o in self._owned.values()
        )

    async def stage(self, current: Callable[[], RoundState], message: Stage) -> Staged:
        """Raises RefusedError (Refusal codes) and FormatError; the slot is untouched then."""
        state = _fenced(current(), message)
        if rank_of_slot(message.slot) != message.rank or message.rank not in state.own_ranks:
            raise FormatError(
                f"stage of rank {message.rank} in slot {message.slot!r}: not of this pod"
            )
        if self._is_owned(message):
            return Staged(message.step)
        await self._layouts.ensure(message.layout)
        state = _fenced(current(), message)  # a SEAL may have come while the layout was read
        slot = SlotFile.open(self._settings.slots_dir, message.slot)
        try:
            check_slot(slot.header(), message, expected=SlotState.FULL)
            if message.slot in self._owned:
                raise RefusedError(Refusal.BUSY, f"slot {message.slot} is being written")
            self._notes.write(message)
            self.memory.pop(slot.name, None)
            slot.set_state(SlotState.OWNED)
        except BaseException:
            slot.close()
            raise
        waits = self._may_hold(state) and any(
            o.stage.rank == message.rank and (o.where is Where.WRITING or not o.dropped)
            for o in self._owned.values()
        )
        self._take(slot, message, state, waits=waits)
        return Staged(message.step)

    # ------------------------------------------------------------------ what waits in memory

    def holding(self) -> tuple[RankHolding, ...]:
        """What the coordinator is to know, of every rank of this pod."""
        state = self._held_round
        if state is None:
            return ()
        return tuple(
            holding_of(Rank(rank), state.round, self._owned.values(), self._stored.values())
            for rank in state.own_ranks
        )

    @property
    def untold(self) -> tuple[RankHolding, ...] | None:
        """`holding`, where the coordinator knows something else."""
        now = self.holding()
        return None if now == self._told or (is_quiet(now) and self._told is None) else now

    def told(self, holding: tuple[RankHolding, ...]) -> None:
        """The coordinator has heard this."""
        known: list[RankHolding] = []
        for said in holding:
            for shard in said.shards:
                if shard.stored:
                    self._stored.pop((said.rank, shard.step), None)
            known.append(replace(said, shards=tuple(s for s in said.shards if not s.stored)))
        self._told = None if is_quiet(known) else tuple(known)
        self._on_held()

    def coordinator_changed(self) -> None:
        """Another coordinator, or another life of it, has received nothing yet."""
        self._told = None
        self.audience += 1
        self.has_coordinator = False

    def coordinator_replied(self) -> None:
        """The coordinator of this round takes messages of this worker."""
        if not self.has_coordinator:
            self.has_coordinator = True
            self._on_held()

    def choose(self, step: Step | None) -> None:
        """The coordinator's choice: the step is written by every rank that holds it."""
        self._chosen = step
        self._advance()

    @property
    def chosen(self) -> Step | None:
        return self._chosen

    @property
    def dropped(self) -> frozenset[Step]:
        """Forgotten, and not released."""
        return frozenset(o.stage.step for o in self._owned.values() if o.dropped)

    def committed(self, step: Step, round_: RestartRound) -> None:
        """The step's manifest is on this node."""
        for owned in self._owned.values():
            if owned.checkpoint == CheckpointId(step, round_):
                owned.committed = True

    def forget(self, steps: frozenset[Step]) -> None:
        """Nobody wants these any more. What was held of them stays until `release`, since manifests
        go first; what is being written is deleted when it is done."""
        for owned in self._owned.values():
            if owned.stage.step in steps:
                owned.dropped = True
        self._stored = {k: r for k, r in self._stored.items() if k[1] not in steps}

    def release(self, steps: frozenset[Step]) -> None:
        """Forgotten, and their manifests are gone from this node: free the slots."""
        dropped = [
            o
            for o in self._owned.values()
            if o.dropped and o.where is Where.HELD and o.stage.step in steps
        ]
        for owned in dropped:
            self._free(owned)
        self._metrics.dropped(len({o.stage.step for o in dropped}))
        self._on_held()

    # ------------------------------------------------------------------ rounds

    def seal(self) -> None:
        """A newer round is sealed: nothing that waits is written any more but by `write_held`."""
        self._held_round = None
        self._chosen = None
        self.room.close()

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait until every slot is written, waits in memory, or has failed."""
        return await self._tasks.join(timeout_seconds)

    async def write_held(self, manifests: frozenset[CheckpointId], timeout_seconds: float) -> bool:
        """Sealed: what waits and is committed goes to the node tier, so that the inventory lists it.
        False if the time ran out. What has no manifest is left: it is no restore point."""
        deadline = self._clock.monotonic() + timeout_seconds
        await self.take_left(manifests)
        waiting = to_seal(self._owned.values(), manifests)
        for step in sorted({o.stage.step for o in waiting}):
            for owned in waiting:
                if owned.stage.step == step:
                    self._start(owned)
            if not await self._tasks.join(max(0.0, deadline - self._clock.monotonic())):
                return False
        return True

    async def take_left(self, manifests: frozenset[CheckpointId]) -> bool:
        """Of what an earlier life owned, for a seal: this process may have died since the ROUND. True if
        anything waits for `write_held`."""
        left = await self._pools.read.run(
            left_in_memory,
            self._settings.slots_dir,
            self._notes,
            self._node,
            self._settings.contract.job_uid,
            manifests,
            known=frozenset(self._owned),
        )
        for found in left:
            if found.stage.slot not in self._owned:
                slot = SlotFile.open(self._settings.slots_dir, found.stage.slot)
                owned = OwnedSlot(found.stage, slot, found.world_size, Where.HELD, waited=True)
                self._owned[slot.name] = owned
        return bool(to_seal(self._owned.values(), manifests))

    def recover(self, state: RoundState, manifests: frozenset[CheckpointId] = frozenset()) -> None:
        """After a ROUND: take up what an earlier life of this process owned in this round, and free
        every other slot that nobody will ever free."""
        self._held_round = state
        self.room.open()
        self._chosen = self._told = None
        self.has_coordinator = False
        self._stored.clear()
        self._newest.clear()
        for owned in tuple(self._owned.values()):
            # A late write of an older round is left alone: it may be of the restore point.
            if owned.stage.round != state.round and owned.where is not Where.WRITING:
                owned.dropped = True
            if owned.dropped and owned.where is Where.HELD:
                self._free(owned)
        for name in list_slots(self._settings.slots_dir):
            if name in self._owned:
                continue
            try:
                slot = SlotFile.open(self._settings.slots_dir, name)
            except HoldfastError as error:
                logs.warning("slot not recovered", slot=name, error=str(error))
                continue
            try:
                message = take_or_free(slot, self._notes, state.round)
            except (HoldfastError, OSError) as error:
                logs.warning("slot not recovered", slot=name, error=str(error))
                message = None
            if message is None:
                slot.close()
            else:
                # All of them wait, whatever was being written: the coordinator knows which is next.
                self._take(slot, message, state, waits=self._may_hold(state))
        for owned in self._owned.values():
            owned.committed = owned.checkpoint in manifests

    # ------------------------------------------------------------------ inside

    def _is_owned(self, message: Stage) -> bool:
        owned = self._owned.get(message.slot)
        return owned is not None and owned.stage == message

    def _may_hold(self, state: RoundState) -> bool:
        return state.held is not None and state.held.policy.keeps_every_step

    def _take(self, slot: SlotFile, message: Stage, state: RoundState, *, waits: bool) -> None:
        slot.throttle = self._pacing.take
        where = Where.DIGESTING if waits else Where.WRITING
        owned = OwnedSlot(message, slot, state.world_size, where, waited=waits)
        self._owned[slot.name] = owned
        self._newest[message.rank] = message.step
        if waits:
            self._tasks.spawn(self._digest(owned), f"digest {message.slot}")
        else:
            self._start(owned)
        self._on_held()

    def _start(self, owned: OwnedSlot) -> None:
        owned.where = Where.WRITING
        self._tasks.spawn(self._write(owned), f"write {owned.stage.slot}")

    def _advance(self) -> None:
        """Start the writes that may start now."""
        state = self._held_round
        if state is None:
            return
        for rank in state.own_ranks:
            owned = next_write(Rank(rank), self._owned.values(), self._chosen)
            if owned is not None:
                self._start(owned)
        self._on_held()

    def _free(self, owned: OwnedSlot) -> None:
        """The note first: an owned slot without one is done with, should this process end here."""
        name = owned.stage.slot
        self._owned.pop(name, None)
        self._notes.remove(name)
        failpoint("memory.before_free")
        try:
            owned.slot.set_state(SlotState.FREE)
        except HoldfastError as error:
            # The trainer can cause this at any time; a task that dies here would end the process.
            logs.warning("a slot was not freed", slot=name, error=str(error))
        owned.slot.close()

    async def _digest(self, owned: OwnedSlot) -> None:
        outcome = await self._writes.digest(owned)
        record = outcome.record
        owned.record, owned.where = record, Where.HELD
        is_done = outcome.failed is not None
        if record is not None and not owned.dropped and self._node.find(record.ref) is not None:
            is_done = True  # written by an earlier life, which died before the slot was free
            self._is_stored(owned, record)
        if is_done or owned.dropped:
            self._free(owned)
        if is_done:
            self._on_outcome(outcome)
        self._advance()

    async def _write(self, owned: OwnedSlot) -> None:
        outcome: Outcome | None = None
        try:
            outcome = await self._writes.write(owned)
        finally:
            record = None if outcome is None else outcome.record
            if outcome is not None and outcome.failed is not None and self._stays(owned, outcome):
                owned.where, owned.failed = Where.HELD, True
            else:
                if record is not None and not owned.dropped:
                    self._is_stored(owned, record)
                self._free(owned)
        if record is not None and owned.dropped:
            await self._writes.delete(record)
        else:
            self._on_outcome(outcome)
        self._advance()

    def _is_stored(self, owned: OwnedSlot, record: ShardRecord) -> None:
        self.memory[owned.stage.slot] = record
        if owned.waited:
            self._stored[(record.header.rank, record.header.step)] = record

    def _stays(self, owned: OwnedSlot, outcome: Outcome) -> bool:
        """It lies in memory as it did before a write of it failed, and its round is not over."""
        state = self._held_round
        current = state is None or state.round == owned.stage.round
        return owned.record is not None and not owned.dropped and not outcome.is_corrupt and current


def _fenced(state: RoundState, message: Stage) -> RoundState:
    refused = fence(state, message.round)
    if refused is not None:
        raise RefusedError(refused.code, refused.message)
    return state
