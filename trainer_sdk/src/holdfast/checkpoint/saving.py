"""One save of one rank: a state's bytes into a free slot, and the slot into the sidecar's hands.

Knows the order of it and nothing about steps: which are saved, and what a failure means for training,
is the `Checkpointer`'s. The order, where some of the state is on a device:
 1. training thread: plan, take a slot (FILLING), start the device's copies, copy the rest, return.
 2. the thread of `DeviceCopies`, when the device is done: the slot is FULL and handed over.
Without a device the training thread does both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.base.layouts import LayoutFiles
from holdfast.connection.session import Session
from holdfast.slots.device import Device, find_device
from holdfast.slots.device_copies import DeviceCopies, PendingCopies
from holdfast.slots.staging import Copier, Slot, SlotRing
from holdfast.state.snapshot import (
    SavePlan,
    Snapshot,
    device_copies,
    plan_save,
    take_snapshot,
    write_payload,
)
from holdfast_core.errors import DeviceError, UnavailableError
from holdfast_core.ids import Level, Rank, RestartRound
from holdfast_core.messages.schema import Stage

logger = logging.getLogger(__name__)


class Saver:
    """Not thread-safe: the training thread's alone, but for `wait_staged`."""

    def __init__(self, session: Session, ring: SlotRing, layouts: LayoutFiles, rank: Rank) -> None:
        self._session = session
        self._ring = ring
        self._layouts = layouts
        self._rank = rank
        self._copier = Copier()
        self._plan: SavePlan | None = None
        self._copies: DeviceCopies | None = None

    def prepare(self) -> None:
        """Before slots are allocated or filled anew: what is under way into them is done, and those
        to come are made for the device that the process uses, if it uses one."""
        if self._copies is not None:
            self._copies.wait()
            return
        device = find_device()
        if device is not None:
            self.use(device)

    def use(self, device: Device) -> None:
        """Tensors that `device` holds are copied by it from now on. Once."""
        self._ring.pin_with(device)
        self._copies = DeviceCopies(device)
        self._copies.start()

    def ensure_slots(self, payload_bytes: int, round_: RestartRound) -> None:
        """Raises CapacityError."""
        too_small = self._ring.capacity_bytes < payload_bytes
        if self._copies is None or too_small or self._ring.has_lost():
            self.prepare()
        self._ring.ensure(payload_bytes, round_)

    def save(self, handle: SaveHandle, state: Mapping[str, Any], wait_seconds: float) -> bool:
        """Copy the state as it is now; False when no slot got free in time.

        What is on a device may be copied while training goes on, and is handed over later; the handle
        tells if that fails. Raises UnavailableError, CapacityError, UnsupportedStateError,
        DeviceError; the slot is FREE again then.
        """
        link = self._session.link
        if link is None or not link.is_connected:
            raise UnavailableError(f"there is no connection to {self._session.peer}")
        snapshot = take_snapshot(state, self._rank)
        if self._plan is None or not self._plan.fits(snapshot):
            self._plan = plan_save(snapshot, self._rank)
        plan = self._plan
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
            if self._copies is None:
                write_payload(plan, snapshot, slot.payload, self._copier.run)
            else:
                pending = self._start(self._copies, plan, snapshot, slot)
                is_on_device = self._copies.device.holds
                write_payload(plan, snapshot, slot.payload, self._copier.run, is_on_device)
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
        """See `Checkpointer.wait_staged`."""
        if self._copies is not None:
            self._copies.hold_back()

    def wait(self, timeout_seconds: float) -> bool:
        """Every save is handed over, or has failed. While not, the slots must stay as they are."""
        return self._copies is None or self._copies.wait(timeout_seconds)

    def close(self) -> None:
        self._copier.close()
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    # ------------------------------------------------------------------ inside

    def _start(
        self, copies: DeviceCopies, plan: SavePlan, snapshot: Snapshot, slot: Slot
    ) -> PendingCopies | None:
        """None when the device has nothing left to do."""
        jobs = device_copies(
            plan, snapshot, slot.payload, copies.device.holds, non_blocking=slot.is_pinned
        )
        if not jobs:
            return None
        if slot.is_pinned:
            return copies.enqueue(jobs, snapshot.optimizers)
        # Here and not in the Copier: its helper thread knows nothing of this thread's streams.
        try:
            for job in jobs:
                job.run()
        except RuntimeError as error:
            raise DeviceError(f"copying a state from its device: {error}") from error
        return None

    def _hand_over(self, slot: Slot, stage: Stage, handle: SaveHandle) -> None:
        slot.complete()
        self._session.stage(stage, slot, handle)

    def _hand_over_late(self, slot: Slot, stage: Stage, handle: SaveHandle) -> None:
        """In the thread of `DeviceCopies`: nobody is there to raise to."""
        try:
            self._hand_over(slot, stage, handle)
        except BaseException as error:
            if not isinstance(
                error, UnavailableError
            ):  # that is one that came later than the end waits
                logger.exception("handing over the save of step %d", handle.step)
            handle.fail(Level.LOCAL, f"{type(error).__name__}: {error}")


def _give_up(slot: Slot, handle: SaveHandle, why: str) -> None:
    """In the thread of `DeviceCopies`: the training thread counts it at its next save."""
    slot.abandon()
    handle.fail(Level.LOCAL, why)
    logger.warning("save of step %d failed, training goes on: %s", handle.step, why)
