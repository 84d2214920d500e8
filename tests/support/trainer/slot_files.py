"""Reads slot files from outside of the process that owns them, as a sidecar or a persister does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast_core.shm.slot_file import HEADER_BYTES, SlotHeader, SlotState


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Header and payload of a slot at one moment."""

    path: Path
    header: SlotHeader
    payload: np.ndarray


def slots_below(directory: Path) -> list[SlotCopy]:
    """Return the slots in `directory` and its subdirectories, in the order of their names."""
    found = []
    for path in sorted(directory.rglob("*.slot")):
        data = np.fromfile(path, dtype=np.uint8)
        header = SlotHeader.unpack(data[:HEADER_BYTES].tobytes())
        found.append(SlotCopy(path, header, data[HEADER_BYTES:]))
    return found


def slot_of(directory: Path, step: int) -> SlotCopy | None:
    """Return the slot that holds `step`, or None."""
    return next((slot for slot in slots_below(directory) if slot.header.step == step), None)


def states_below(directory: Path) -> list[SlotState]:
    """Return the states of the slots in `directory` and its subdirectories."""
    return [slot.header.state for slot in slots_below(directory)]


def all_taken(directory: Path) -> bool:
    """Return whether the other process has taken every slot that was handed over."""
    return SlotState.FULL not in states_below(directory)
