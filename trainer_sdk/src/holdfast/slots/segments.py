"""How a payload is cut for a ring of slots through which it streams (ADR 0069)."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_core.ids import ByteRange
from holdfast_core.shards.record import CHUNK_BYTES

SEGMENT_SLOTS = 8
"""Slots of a ring. While one is filled, the others wait to be written."""


def segment_bytes(ring_bytes: int, payload_bytes: int) -> int:
    """Return the size of a segment: whole chunks, and no more than the ring or the payload needs."""
    largest = max(ring_bytes // SEGMENT_SLOTS // CHUNK_BYTES, 1)
    needed = -(-payload_bytes // (SEGMENT_SLOTS * CHUNK_BYTES))
    return min(largest, needed) * CHUNK_BYTES


def segments_of(payload_bytes: int, capacity_bytes: int) -> Iterator[ByteRange]:
    """Yield the segments of a payload in order, for slots of this capacity. The last one may be shorter."""
    size_bytes = capacity_bytes // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, payload_bytes, size_bytes):
        yield ByteRange(start, min(start + size_bytes, payload_bytes))
