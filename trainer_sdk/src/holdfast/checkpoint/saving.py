"""One save of one rank: copy the state's bytes into a free slot and hand the slot over.

`Checkpointer` decides which steps are saved and what a failure means for training. The order, where
some of the state is on a device:
 1. The training thread plans the save, acquires a slot (FILLING), starts the device's copies, copies the
    rest and returns.
 2. When the device is done, the thread of `DeviceCopies` marks the slot FULL and hands it over.
Without a device the training thread does both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.connection.session import Session
from holdfast.slots.device import find_device
from holdfast.slots.device_copies import DeviceCopies, PendingCopies
from holdfast.slots.node_room import node_room_warning
from holdfast.slots.staging import Copier, Slot, SlotRing
from holdfast.state.copying import PayloadTarget, run_device_copies
from holdfast.state.sizing import estimated_bytes, slot_bytes
from holdfast.state.snapshot import SavePlan, Snapshot, Snapshots, paused_collector, plan_save
from holdfast_core.errors import DeviceError, UnavailableError
from holdfast_core.ids import Level, RestartRound
from holdfast_core.messages.schema import Stage
from holdfast_core.shm.shared_files import LayoutFiles

logger = logging.getLogger(__name__)


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

    def prepare(self) -> None:
        """Wait for pending device copies, or start to use the process's device, if it has one by now.

        Call it before slots are allocated or a restore fills them: no device may write into them then,
        and new slots are pinned for the device.
        """
        if self._copies is not None:
            self._copies.wait()
            return
        device = find_device()
        if device is not None:
            self.use(DeviceCopies(device))

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
    def save(self, handle: SaveHandle, state: Mapping[str, Any], wait_seconds: float) -> bool:
        """Copy the state as it is now. Return False when no slot became free within `wait_seconds`.

        A device may continue its copies after this returns. The slot is then handed over later, and the
        handle reports a failure. Raises UnavailableError, CapacityError, UnsupportedStateError or
        DeviceError; the slot is then FREE again.
        """
        if not self._session.is_connected:
            raise UnavailableError(f"there is no connection to {self._session.peer}")
        snapshot, plan = self._read(state)
        self._layouts.ensure(plan.layout, plan.layout_digest)
        self.ensure_slots(plan.payload_bytes, handle.round)
        slot = self._ring.acquire(wait_seconds)
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

    def _read(self, state: Mapping[str, Any]) -> tuple[Snapshot, SavePlan]:
        """Read the state, and plan its payload if the last plan does not fit any more."""
        snapshot = self._snapshots.take(state)
        if self._plan is None or not self._plan.fits(snapshot):
            self._plan = plan_save(snapshot, self._rank)
        return snapshot, self._plan

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
