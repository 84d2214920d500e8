"""The saves of one rank: copy the state's bytes into a free slot and hand the slot over.

`Checkpointer` decides which steps are saved and what a failure means for training. The order, where
some of the state is on a device:
 1. The training thread plans the save, acquires a slot (FILLING), starts the device's copies, copies the
    rest and returns.
 2. When the device is done, the thread of `DeviceCopies` marks the slot FULL and hands it over.
Without a device the training thread does both.

`Saves` keeps them in the order in which the script makes them. A loop that is left early saves its last step
without handing it over. It is not known at that moment whether an exception left the loop, or whether the
script will roll back. A later call keeps or drops the save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.checkpoint.decisions import SaveDecisions
from holdfast.checkpoint.status import SaveStatus
from holdfast.connection.session import Session
from holdfast.places.place import Outage, Place, wait_connected
from holdfast.slots.capacity import node_room_warning
from holdfast.slots.device import CudaDevice, DeviceCopies, PendingCopies
from holdfast.slots.staging import Copier, Slot, SlotRing
from holdfast.state.sizing import estimated_bytes, slot_bytes
from holdfast.state.snapshot import (
    PayloadTarget,
    SavePlan,
    Snapshot,
    Snapshots,
    paused_collector,
    plan_save,
    run_device_copies,
)
from holdfast.state.tensors import uses_gpu
from holdfast.training.inexact_data import inexact_data
from holdfast.training.loop import Position
from holdfast_core.errors import DeviceError, SaveFailedError, UnavailableError
from holdfast_core.ids import Digest, Level, RestartRound, Step
from holdfast_core.messages.schema import Stage
from holdfast_core.shm.shared_files import LayoutFiles

logger = logging.getLogger(__name__)

NO_METRICS: Mapping[str, float] = {}


class Saver:
    """Saves states into the ring's slots. Not thread-safe, except for `wait_staged`."""

    def __init__(
        self, session: Session, ring: SlotRing, layouts: LayoutFiles, snapshots: Snapshots
    ) -> None:
        self._session = session
        self._ring = ring
        self._layouts = layouts
        self._rank = snapshots.rank
        self._copier = Copier()
        self._snapshots = snapshots
        self._plan: SavePlan | None = None
        self._copies: DeviceCopies | None = None
        self._layout_of: dict[str, Digest] = {}
        """The layout of the last save into each slot."""

    def prepare(self) -> None:
        """Wait for pending device copies, or start to use the process's device, if it has one by now.

        Call it before slots are allocated or a restore fills them: no device may write into them then,
        and new slots are pinned for the device.
        """
        if self._copies is not None:
            self._copies.wait()
            return
        if uses_gpu():
            self.use(DeviceCopies(CudaDevice()))

    def use(self, copies: DeviceCopies) -> None:
        """Let a device copy the tensors that it holds, from now on. Call it once at most."""
        self._ring.pin_with(copies.device)
        self._copies = copies
        copies.start()

    def ensure_slots(self, payload_bytes: int, round_: RestartRound) -> None:
        """Make sure that the slots hold `payload_bytes` each. Raises CapacityError."""
        too_small = self._ring.capacity_bytes < payload_bytes
        if self._copies is None or too_small or self._ring.has_lost():
            self.prepare()
        self._ring.ensure(payload_bytes, round_)

    def allocate(self, state: Mapping[str, Any], round_: RestartRound) -> None:
        """Make sure that the slots hold `state`, with the tensors that its optimizers will create.

        Raises what `save` raises.
        """
        snapshot, plan = self._read(state)
        # A restore estimates the size. In the process that follows a killed one, it keeps the slots, and what
        # they hold, only if they are as large.
        size = max(plan.payload_bytes, estimated_bytes(snapshot))
        self._require_node_room(size)
        self.ensure_slots(slot_bytes(state, size), round_)

    def _require_node_room(self, payload_bytes: int) -> None:
        policy, room_bytes = self._session.policy, self._session.node_bytes
        if policy is None or not room_bytes:
            return
        warning = node_room_warning(payload_bytes, policy, room_bytes)
        if warning:
            logger.warning("rank %d: %s", self._rank, warning)

    # The collector would start after the state is read, and visit all objects that were made for it.
    @paused_collector()
    def save(
        self,
        handle: SaveHandle,
        state: Mapping[str, Any],
        wait_seconds: float,
        metrics: Mapping[str, float] = NO_METRICS,
        while_busy: Callable[[], object] = lambda: None,
    ) -> bool:
        """Copy the state as it is now. Return False when no slot became free within `wait_seconds`.

        `metrics` are saved with the state: `holdfast merge` weights checkpoints by them. `while_busy` is
        called repeatedly while all slots are busy, and its exception ends the wait.

        A device may continue its copies after this returns. The slot is then handed over later, and the
        handle reports a failure. Raises UnavailableError, CapacityError, UnsupportedStateError or
        DeviceError; the slot is then FREE again.
        """
        if not self._session.is_connected:
            raise UnavailableError(f"there is no connection to {self._session.peer}")
        snapshot, plan = self._read(state, metrics)
        self._layouts.ensure(plan.layout, plan.layout_digest)
        self.ensure_slots(plan.payload_bytes, handle.round)
        slot = self._ring.acquire(wait_seconds, while_busy)
        if slot is None:
            return False
        stage = Stage(
            handle.round,
            handle.step,
            self._rank,
            slot.name,
            plan.payload_bytes,
            plan.layout_digest,
        )
        slot.begin(handle.round, handle.step, plan.payload_bytes)
        self._use_layout(slot.name, plan.layout_digest)
        pending = None
        try:
            target = _target(slot, plan)
            if self._copies is None:
                target.write(snapshot, self._copier.run)
            else:
                pending = self._start(self._copies, target, snapshot, slot)
                target.write(snapshot, self._copier.run, self._copies.device.holds)
        except BaseException:
            if self._copies is not None and pending is not None:
                self._copies.cancel(pending)
            slot.abandon()
            raise
        if self._copies is None or pending is None:
            self._hand_over(slot, stage, handle)
        else:
            self._copies.when_done(
                pending,
                partial(self._hand_over_late, slot, stage, handle),
                partial(_give_up, slot, handle),
            )
        return True

    def wait_staged(self) -> None:
        """Make later work on the current stream wait for the device's copies of all saves so far."""
        if self._copies is not None:
            self._copies.block_later_work()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until every save is handed over or has failed. Return False at the time-out.

        After a time-out the slots must stay mapped, because a device may still write into them.
        """
        return self._copies is None or self._copies.wait(timeout_seconds)

    def close(self) -> None:
        self._copier.close()
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    # ------------------------------------------------------------------ inside

    def _read(
        self, state: Mapping[str, Any], metrics: Mapping[str, float] = NO_METRICS
    ) -> tuple[Snapshot, SavePlan]:
        """Read the state, and plan its payload if the last plan does not fit any more."""
        snapshot = self._snapshots.take(state).with_metrics(metrics)
        if self._plan is None or not self._plan.fits(snapshot):
            self._plan = plan_save(snapshot, self._rank)
        return snapshot, self._plan

    def _use_layout(self, slot: str, digest: Digest) -> None:
        """Remove the layout of the save that was in the slot before, unless another slot has the same.

        A state whose structure changes at each save would fill the shared memory with layouts.
        """
        before, self._layout_of[slot] = self._layout_of.get(slot), digest
        if before is not None and before not in self._layout_of.values():
            self._layouts.remove(before)

    def _start(
        self, copies: DeviceCopies, target: PayloadTarget, snapshot: Snapshot, slot: Slot
    ) -> PendingCopies | None:
        """Start the device's copies into `slot`. Return None if none of them is pending on return."""
        jobs = target.device_copies(snapshot, copies.device.holds)
        if not jobs:
            return None
        if slot.is_pinned:
            return copies.enqueue(jobs, snapshot.optimizers)
        # These copies do not run in the Copier: its helper thread does not use this thread's streams.
        try:
            run_device_copies(jobs, non_blocking=False)
        except RuntimeError as error:
            raise DeviceError(f"copying a state from its device: {error}") from error
        return None

    def _hand_over(self, slot: Slot, stage: Stage, handle: SaveHandle) -> None:
        slot.complete()
        self._session.stage(stage, slot, handle)

    def _hand_over_late(self, slot: Slot, stage: Stage, handle: SaveHandle) -> None:
        """Hand the slot over in the thread of `DeviceCopies`. An error fails the handle and is not raised."""
        try:
            self._hand_over(slot, stage, handle)
        except BaseException as error:
            # UnavailableError means that the link is closed: the copies took longer than `close` waits.
            if not isinstance(error, UnavailableError):
                logger.exception("handing over the save of step %d", handle.step)
            handle.fail(Level.LOCAL, f"{type(error).__name__}: {error}")


def _target(slot: Slot, plan: SavePlan) -> PayloadTarget:
    """Return the slot's memory for payloads of the plan. Its views serve all saves into this slot."""
    kept = slot.kept
    if not isinstance(kept, PayloadTarget) or kept.plan is not plan:
        kept = slot.kept = PayloadTarget(plan, slot.payload)
    return kept


def _give_up(slot: Slot, handle: SaveHandle, why: str) -> None:
    """Fail the save in the thread of `DeviceCopies`. The training thread counts it at its next save."""
    slot.abandon()
    handle.fail(Level.LOCAL, why)
    logger.warning("save of step %d failed, training continues: %s", handle.step, why)


_BUSY_WAIT_SECONDS = 600.0
_REFUSED_SECONDS = 60.0
"""For how long a save waits for a slot while each new process of its place refuses this rank: the training's
last step would be lost with a folder that is away for less."""
_LEAVE_WAIT_SECONDS = 30.0
"""Time to wait for a free slot when a loop is left. An exception that left it should not be delayed for
long."""


class Saves:
    """Makes the saves of one rank. Only the training thread uses it."""

    def __init__(
        self,
        place: Place,
        session: Session,
        saver: Saver,
        decisions: SaveDecisions,
        status: SaveStatus,
        position: Position,
        *,
        waits: bool,
    ) -> None:
        """Create an object that has saved nothing. With `waits`, each save waits for a free slot."""
        self.have_begun = False
        """Whether a save was started since the folder was opened or rolled back. The same on every rank."""
        self.last: Step | None = None
        """The last step that was saved, until it is rolled back or dropped."""
        self._place = place
        self._session = session
        self._saver = saver
        self._decisions = decisions
        self._status = status
        self._position = position
        self._waits = waits
        self._left: SaveHandle | None = None
        """The held save of a loop that was left early."""
        self._left_error: Exception | None = None
        self._has_looked_at_data = False

    def save(self, step: Step, state: Mapping[str, Any], *, is_important: bool) -> SaveHandle:
        """Save `step`. A failure raises only if the script asked for it.

        Args:
            step: Number of optimizer steps done.
            state: The state.
            is_important: Wait for a free slot, and for the connection: nothing follows this save soon.

        Raises ConfigError where this run may not save.
        """
        self._place.take_for_training()
        self.hand_over_left()
        handle = SaveHandle(step, self._session.current_round, self._saving)
        slot_seconds = _BUSY_WAIT_SECONDS if is_important or self._waits else 0.0
        self._start(handle, state, slot_seconds, _BUSY_WAIT_SECONDS if is_important else 0.0)
        if not self._has_looked_at_data:
            self._has_looked_at_data = True
            for line in inexact_data(state) if self._session.rank == 0 else ():
                logger.warning(line)
        return handle

    def save_left(self, step: Step, state: Mapping[str, Any]) -> None:
        """Save the last step of a loop that was left early, and hold that save."""
        self._left = SaveHandle(step, self._session.current_round, self._saving)
        self._session.saves.defer(self._left)
        try:
            self._place.take_for_training()
            self._start(self._left, state, _LEAVE_WAIT_SECONDS, _LEAVE_WAIT_SECONDS)
        except Exception as error:  # noqa: BLE001 - Python would only print it; `close` raises it
            self._left_error = error

    @property
    def left_step(self) -> Step | None:
        """Step of the held save."""
        return None if self._left is None else self._left.step

    def hand_over_left(self) -> None:
        """Hand over the held save. Raise the error of that save, if any."""
        error = self.take_left_error()
        if self._left is not None:
            self._left = None
            self._session.hand_over_deferred()
        if error is not None:
            raise error

    def take_left_error(self) -> Exception | None:
        """Return the error of the held save once."""
        error, self._left_error = self._left_error, None
        return error

    def drop_left(self, why: str) -> None:
        """Drop the held save."""
        if self._left is not None:
            self._left = self._left_error = self.last = None
            self._session.saves.drop_deferred(f"dropped: {why}")

    def roll_back(self) -> None:
        """Forget the saves of the steps that the ranks repeat."""
        self.have_begun = False
        self.last = None

    def _saving(self) -> AbstractContextManager[None]:
        return self._status.progress.paused("a save")

    def _start(
        self,
        handle: SaveHandle,
        state: Mapping[str, Any],
        slot_seconds: float,
        connection_seconds: float,
    ) -> None:
        with self._saving():  # the end of the pause reports the step and the time of the save
            self._make(handle, state, slot_seconds, connection_seconds)
        self._decisions.slot_was_filled()
        self._decisions.foresee(Step(handle.step + 1))

    def _make(
        self,
        handle: SaveHandle,
        state: Mapping[str, Any],
        slot_seconds: float,
        connection_seconds: float,
    ) -> None:
        step = handle.step
        started = time.monotonic()
        self.have_begun = True
        self._position.trained(step)
        try:
            self._position.saved(state)
            self._status.count_older_failures()
            self._place.keep_for_training()
            if connection_seconds:
                wait_connected(self._session, self._place, connection_seconds, may_close=False)
            self._hand_over(handle, state, slot_seconds)
            self.last = step
        except SaveFailedError:
            raise
        # A state's own code may raise any exception, and a failed save must not end training.
        except Exception as error:  # noqa: BLE001 - see above
            handle.fail(Level.LOCAL, f"{type(error).__name__}: {error}")
            self._status.count_failure(error, step)
        finally:
            self._status.ended(step, time.monotonic() - started)

    def _hand_over(self, handle: SaveHandle, state: Mapping[str, Any], wait_seconds: float) -> None:
        metrics = self._status.progress.metrics if self._session.rank == 0 else NO_METRICS
        outage: Outage | None = None

        def while_busy() -> None:
            """Raise if the process that would free a slot has ended, with no other to follow."""
            nonlocal outage
            outage = outage or Outage(self._session, self._place, _REFUSED_SECONDS)
            outage.expect_end()

        if self._saver.save(handle, state, wait_seconds, metrics, while_busy):
            self._status.handed_over(handle)
            return
        self._status.found_no_slot = True
        if wait_seconds:
            raise UnavailableError(
                f"save of step {handle.step}: no slot became free within {wait_seconds:g} s: "
                f"{self._place.where_to_look}"
            )
        self._status.no_slot(handle)
