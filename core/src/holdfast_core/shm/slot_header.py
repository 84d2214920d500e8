"""Header of a shared-memory slot: its state, which says who may write to it, and the shard in it.

A slot is a file in the pod's tmpfs: HEADER_BYTES of header, then the payload. The rank allocates and
prefaults it, so its pages are charged to the trainer container. The sidecar uses pread and pwrite and
never mmap, because a truncated file must cause an error in the sidecar and not SIGBUS.

These processes set the states. The state word is written last, in a 4-byte aligned write of its own.
  FREE -> FILLING (rank, before the copy) -> FULL (rank, after the copy) -> OWNED (sidecar, on Stage)
  -> FREE (sidecar, when the shard is durable on the node tier, or dropped for a newer one).
After a restore the sidecar leaves the slot FREE with its identity set, so that it can serve the same
restore again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from holdfast_core.errors import FormatError
from holdfast_core.ids import Rank, RestartRound, Step

HEADER_BYTES = 4096
MAGIC = b"HFSLOT01"
_LAYOUT = struct.Struct("<8sIIqqqqq")
"""magic, state, reserved, round, step, rank, payload bytes, capacity bytes"""
STATE_OFFSET = 8
_STATE = struct.Struct("<I")
_NONE = -1


class SlotState(IntEnum):
    """State of a slot. The module's docstring lists who sets which state."""

    FREE = 0
    FILLING = 1
    FULL = 2
    OWNED = 3


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Decoded header. Without `round` and `step` the slot names no shard of a checkpoint."""

    state: SlotState
    rank: Rank
    capacity_bytes: int
    round: RestartRound | None = None
    step: Step | None = None
    payload_bytes: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes, which are fewer than HEADER_BYTES."""
        return _LAYOUT.pack(
            MAGIC,
            self.state,
            0,
            _NONE if self.round is None else self.round,
            _NONE if self.step is None else self.step,
            self.rank,
            self.payload_bytes,
            self.capacity_bytes,
        )

    @classmethod
    def unpack(cls, data: bytes) -> SlotHeader:
        """Parse a header. Raises FormatError if the bytes are not a slot header or are inconsistent."""
        if len(data) < _LAYOUT.size:
            raise FormatError(f"slot header: {len(data)} bytes, expected {_LAYOUT.size}")
        magic, state, _, round_, step, rank, payload, capacity = _LAYOUT.unpack_from(data)
        if magic != MAGIC:
            raise FormatError(f"slot header: magic {magic!r}, expected {MAGIC!r}")
        if not 0 <= payload <= capacity:
            raise FormatError(f"slot header: payload of {payload} bytes in a slot of {capacity}")
        try:
            known = SlotState(state)
        except ValueError as error:
            raise FormatError(f"slot header: unknown state {state}") from error
        return cls(
            known,
            Rank(rank),
            capacity,
            None if round_ == _NONE else RestartRound(round_),
            None if step == _NONE else Step(step),
            payload,
        )


def pack_state(state: SlotState) -> bytes:
    """Return the state word, for a write at STATE_OFFSET."""
    return _STATE.pack(state)


def slot_name(rank: Rank, index: int) -> str:
    return f"rank{rank:06d}.{index}.slot"
