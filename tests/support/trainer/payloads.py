"""Payloads of states, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.support.trainer.snapshots import take_snapshot

from holdfast.slots.staging import Copier
from holdfast.state.snapshot import PayloadTarget, plan_save
from holdfast_core.ids import Rank

RANK = Rank(0)


def stored(state: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the payload (uint8) that a save of the state writes now."""
    snapshot = take_snapshot(state, RANK)
    plan = plan_save(snapshot, RANK)
    target = np.zeros(plan.payload_bytes, dtype=np.uint8)
    PayloadTarget(plan, target).write(snapshot, Copier().run)
    return target
