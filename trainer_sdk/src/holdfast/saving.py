"""One save of one rank: a state's bytes into a free slot, and the slot into the sidecar's hands.

Knows the order of it and nothing about steps: which are saved, and what a failure means for training,
is the `Checkpointer`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.handle import SaveHandle
from holdfast.layouts import LayoutFiles
from holdfast.session import Session
from holdfast.staging import Copier, SlotRing
from holdfast.state.snapshot import SavePlan, plan_save, take_snapshot, write_payload
from holdfast_core.errors import UnavailableError
from holdfast_core.ids import Rank
from holdfast_core.transfer.messages import Stage


class Saver:
    """Not thread-safe: the training thread's alone."""

    def __init__(self, session: Session, ring: SlotRing, layouts: LayoutFiles, rank: Rank) -> None:
        self._session = session
        self._ring = ring
        self._layouts = layouts
        self._rank = rank
        self._copier = Copier()
        self._plan: SavePlan | None = None

    def save(self, handle: SaveHandle, state: Mapping[str, Any], wait_seconds: float) -> bool:
        """Copy the state as it is now and hand it over; False when no slot got free in time.

        Raises UnavailableError, CapacityError, UnsupportedStateError; the slot is FREE again then.
        """
        link = self._session.link
        if link is None or not link.is_connected:
            raise UnavailableError("there is no connection to the sidecar")
        snapshot = take_snapshot(state, self._rank)
        if self._plan is None or not self._plan.fits(snapshot):
            self._plan = plan_save(snapshot, self._rank)
        plan = self._plan
        self._layouts.ensure(plan.layout, plan.layout_digest)
        self._ring.ensure(plan.payload_bytes, handle.round)
        slot = self._ring.acquire(wait_seconds)
        if slot is None:
            return False
        slot.begin(handle.round, handle.step, plan.payload_bytes)
        try:
            write_payload(plan, snapshot, slot.payload, self._copier.run)
        except BaseException:
            slot.abandon()
            raise
        slot.complete()
        stage = Stage(
            handle.round,
            handle.step,
            self._rank,
            slot.name,
            plan.payload_bytes,
            plan.layout_digest,
        )
        self._session.stage(stage, slot, handle)
        return True

    def close(self) -> None:
        self._copier.close()
