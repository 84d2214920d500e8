"""From a full slot to a durable shard on the node tier.

1. Stage: the slot's header must say exactly what the message says; then the sidecar owns the slot
   and the rank gets `Staged`: from here on its bytes do not change.
2. One pass in a thread: digest and write. 3. The slot is free again, and the shard goes to `Flow`.
A failure of 2 is told to the rank and reported; it never fails a step, and the slot is freed.

What was staged is noted beside the slots (in the same tmpfs), so that a sidecar that restarts in
the middle of 2 finishes it instead of leaving the slot owned for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import FormatError, HoldfastError, RefusedError
from holdfast_core.format.slot import SlotHeader, SlotState
from holdfast_core.ids import Level, TierName
from holdfast_core.pacing import Pacing
from holdfast_core.slot_file import SlotFile, list_slots, rank_of_slot
from holdfast_core.tiers.base import NodeTier, ShardHeader, ShardRecord
from holdfast_core.transfer.codec import dumps, loads
from holdfast_core.transfer.messages import Refusal, SaveFailed, Stage, Staged
from holdfast_sidecar import logs
from holdfast_sidecar.failures import Failures
from holdfast_sidecar.layouts import RankLayouts
from holdfast_sidecar.metrics import Metrics
from holdfast_sidecar.pools import Pools
from holdfast_sidecar.rounds import RoundState, fence
from holdfast_sidecar.settings import Settings
from holdfast_sidecar.stalled import until_done
from holdfast_sidecar.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a staged slot: a durable shard, or why not."""

    stage: Stage
    record: ShardRecord | None
    failed: SaveFailed | None = None


class Stager:
    """Owns slots between Stage and durability. `on_outcome` hears each result, on the loop."""

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
    ) -> None:
        self._settings = settings
        self._node = node
        self._layouts = layouts
        self._pools = pools
        self._failures = failures
        self._metrics = metrics
        self._clock = clock
        self._pacing = pacing
        self._on_outcome = on_outcome
        self._pending: dict[str, Stage] = {}
        self._tasks = Tasks()
        self.memory: dict[str, ShardRecord] = {}
        """Slots whose bytes are known to be those of a digested shard, while the header agrees."""

    @property
    def idle(self) -> bool:
        return not self._pending

    def owns(self, slot: str) -> bool:
        return slot in self._pending

    async def stage(self, current: Callable[[], RoundState], message: Stage) -> Staged:
        """Raises RefusedError (Refusal codes) and FormatError; the slot is untouched then."""
        state = _fenced(current(), message)
        if rank_of_slot(message.slot) != message.rank or message.rank not in state.own_ranks:
            raise FormatError(
                f"stage of rank {message.rank} in slot {message.slot!r}: not of this pod"
            )
        if self._pending.get(message.slot) == message:
            return Staged(message.step)
        await self._layouts.ensure(message.layout)
        state = _fenced(current(), message)  # a SEAL may have come while the layout was read
        slot = SlotFile.open(self._settings.slots_dir, message.slot)
        try:
            _check(slot.header(), message)
            if message.slot in self._pending:
                raise RefusedError(Refusal.BUSY, f"slot {message.slot} is being written")
            self._own(slot, message)
        except BaseException:
            slot.close()
            raise
        self._write_later(slot, message, state.world_size)
        return Staged(message.step)

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait until every owned slot is written or has failed."""
        return await self._tasks.join(timeout_seconds)

    def recover(self, state: RoundState) -> None:
        """After a ROUND: finish what an earlier life of this process owned in this round, and free
        every other slot that nobody will ever free."""
        for name in list_slots(self._settings.slots_dir):
            if name in self._pending:
                continue
            try:
                slot = SlotFile.open(self._settings.slots_dir, name)
            except HoldfastError as error:
                logs.warning("slot not recovered", slot=name, error=str(error))
                continue
            if not self._recover_slot(slot, state):
                slot.close()

    def _recover_slot(self, slot: SlotFile, state: RoundState) -> bool:
        """True if a write was started, which then owns `slot`."""
        try:
            header = slot.header()
            if header.state is SlotState.OWNED and header.round == state.round:
                path = self._settings.staged_dir / f"{slot.name}.json"
                message = loads(Stage, path.read_bytes())
                _check(header, message, expected=SlotState.OWNED)
                self._pending[slot.name] = message
                self._write_later(slot, message, state.world_size)
                return True
            if header.state is SlotState.OWNED or (
                header.state is SlotState.FULL and header.round != state.round
            ):
                slot.set_state(SlotState.FREE)
        except (HoldfastError, OSError) as error:
            logs.warning("slot not recovered", slot=slot.name, error=str(error))
        return False

    def _own(self, slot: SlotFile, message: Stage) -> None:
        directory = self._settings.staged_dir
        directory.mkdir(mode=0o770, exist_ok=True)
        (directory / f"{slot.name}.json").write_bytes(dumps(message))
        self.memory.pop(slot.name, None)
        slot.set_state(SlotState.OWNED)
        self._pending[slot.name] = message

    def _write_later(self, slot: SlotFile, message: Stage, world_size: int) -> None:
        slot.throttle = self._pacing.throttle.take
        self._tasks.spawn(self._write(slot, message, world_size), f"write {message.slot}")

    async def _write(self, slot: SlotFile, message: Stage, world_size: int) -> None:
        subject = f"save of rank {message.rank}"
        header = ShardHeader(
            self._settings.contract.job_uid,
            message.round,
            message.step,
            message.rank,
            world_size,
            message.layout,
            message.payload_bytes,
        )
        started = self._clock.monotonic()
        try:
            record = await self._watched(slot, header, subject)
        except (HoldfastError, OSError) as error:
            failure = self._failures.note(subject, TierName.NODE, error, step=message.step)
            failed = SaveFailed(
                message.step, message.round, Level.LOCAL, failure.reason, failure.message
            )
            outcome = Outcome(message, None, failed)
        else:
            self._failures.healthy(subject)
            self.memory[message.slot] = record
            self._metrics.stored(
                TierName.NODE, record.header.payload_bytes, self._clock.monotonic() - started
            )
            outcome = Outcome(message, record)
        finally:
            self._pending.pop(message.slot, None)
            (self._settings.staged_dir / f"{message.slot}.json").unlink(missing_ok=True)
            slot.set_state(SlotState.FREE)
            slot.close()
        self._on_outcome(outcome)

    async def _watched(self, slot: SlotFile, header: ShardHeader, subject: str) -> ShardRecord:
        """Write the shard; while the disk hangs, that is a failure for all to see."""
        seconds = self._settings.disk_quiet_seconds

        def stalled(quiet: float) -> None:
            self._failures.note_text(
                subject,
                TierName.NODE,
                "NodeVolumeHangs",
                f"step {header.step}: {slot.bytes_read} of {header.payload_bytes} bytes were handed to "
                f"the node volume, and none for {quiet:.0f} s: its disk hangs, or is far too slow; "
                "training goes on, saves that find no free slot are skipped; look at the node's disk",
                step=header.step,
            )

        return await until_done(
            self._pools.shard.run(self._node.write_shard, header, slot),
            lambda: slot.bytes_read,
            quiet_seconds=seconds,
            stalled=stalled,
            moving=lambda: self._failures.healthy(subject),
        )


def _fenced(state: RoundState, message: Stage) -> RoundState:
    refused = fence(state, message.round)
    if refused is not None:
        raise RefusedError(refused.code, refused.message)
    return state


def _check(header: SlotHeader, message: Stage, *, expected: SlotState = SlotState.FULL) -> None:
    """The header is what counts: a torn or reused slot contradicts the message."""
    found = (header.state, header.round, header.step, header.payload_bytes)
    wanted = (expected, message.round, message.step, message.payload_bytes)
    if found != wanted:
        raise FormatError(
            f"slot {message.slot}: state, round, step, bytes are {found}, the message says {wanted}"
        )
