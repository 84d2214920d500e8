"""The header of a shared-memory slot: who may touch the file, and what lies in it.

A slot is a file in the pod's tmpfs: HEADER_BYTES of header, then the payload. The rank allocates
and pre-faults it, so its pages are charged to the trainer container. The sidecar uses pread/pwrite,
never mmap: a truncated file must give it an error, not SIGBUS.

States and who sets them (the state word is written last, alone, 4 bytes aligned):
  FREE -> FILLING (rank, before the copy) -> FULL (rank, after it) -> OWNED (sidecar, on Stage)
  -> FREE (sidecar, when the shard is durable on the node tier, or given up for a newer one). After a
  restore the sidecar leaves a filled slot FREE with its identity set: it can serve the same restore
  again.
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
    FREE = 0
    FILLING = 1
    FULL = 2
    OWNED = 3


@dataclass(frozen=True, slots=True)
class SlotHeader:
    state: SlotState
    rank: Rank
    capacity_bytes: int
    round: RestartRound | None = None
    step: Step | None = None
    payload_bytes: int = 0

    def pack(self) -> bytes:
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
        """Raises FormatError when the bytes are no slot header, or contradict themselves."""
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
    """The state word alone, for a write at STATE_OFFSET."""
    return _STATE.pack(state)


def slot_name(rank: Rank, index: int) -> str:
    return f"rank{rank:06d}.{index}.slot"
