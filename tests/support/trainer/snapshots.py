"""Snapshots of a state that has no earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.state.snapshot import Snapshot, Snapshots
from holdfast_core.ids import Rank


def take_snapshot(state: Mapping[str, Any], rank: Rank) -> Snapshot:
    """Read the state in full, without a template of an earlier snapshot."""
    return Snapshots(rank).take(state)
