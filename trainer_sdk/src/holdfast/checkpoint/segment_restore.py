"""Reads a rank's shard from its sidecar into the state's tensors, segment by segment (ADR 0069).

1. The header and the objects are read, and the shard is compared with the state. Nothing is written yet.
2. The segments are read in order and copied into the tensors. The sidecar verifies each chunk.

If a read fails in step 2, parts of the checkpoint stay in the state. Another restore must overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.connection.session import Session
from holdfast.slots.segments import SEGMENT_SLOTS, segment_bytes, segments_of
from holdfast.slots.staging import SlotRing
from holdfast.state.destinations import Destinations
from holdfast.state.restore_target import RestoreTarget
from holdfast_core.errors import CorruptionError
from holdfast_core.format.payload import LENGTH_BYTES, header_bytes, parse_payload
from holdfast_core.ids import ByteRange, Rank, RestartRound, TierName
from holdfast_core.messages.schema import Fill, Filled, Segment
from holdfast_core.shards.record import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class SegmentReader:
    """Reads ranges of the rank's shard of the restore point, through one slot of the ring."""

    session: Session
    ring: SlotRing
    round: RestartRound
    rank: Rank
    payload_bytes: int

    def open(self, ring_bytes: int) -> None:
        """Allocate the ring. Raises CapacityError."""
        self.ring.use(SEGMENT_SLOTS, is_bounded=True)
        self.ring.ensure(segment_bytes(ring_bytes, self.payload_bytes), self.round)

    def fetch(self, segment: ByteRange) -> tuple[memoryview, TierName]:
        """Return verified bytes, which are valid until the next call, and the tier that they come from.

        Args:
            segment: Range of the payload that begins at a chunk, and ends at a chunk or at the payload's end.
        """
        slot = self.ring.slots[0]
        wanted = Segment(segment.start, segment.stop)
        fill = Fill(self.round, self.rank, (slot.offer(),), segment=wanted)
        filled = self.session.request(fill, Filled)
        return slot.payload[: segment.length_bytes].data, filled.tier

    def read(self, wanted: ByteRange) -> bytes:
        """Return a copy of any range."""
        start = wanted.start // CHUNK_BYTES * CHUNK_BYTES
        stop = min(-(-wanted.stop // CHUNK_BYTES) * CHUNK_BYTES, self.payload_bytes)
        found = bytearray()
        for piece in segments_of(stop - start, self.ring.capacity_bytes):
            found += self.fetch(ByteRange(start + piece.start, start + piece.stop))[0]
        return bytes(memoryview(found)[wanted.start - start : wanted.stop - start])


def read_segments(
    reader: SegmentReader, target: RestoreTarget, begins: Callable[[], None]
) -> tuple[dict[str, object], TierName] | None:
    """Read the shard into the tensors of the state. Return None, without writing, if the state does not fit.

    Args:
        reader: The opened reader.
        target: The current state.
        begins: Called before the first byte is written.

    Returns:
        The saved state, whose tensors are those of the current state or lie in new memory, and the tier.

    Raises:
        FormatError: The payload is invalid.
        HoldfastError: A segment cannot be read.
    """
    size = reader.payload_bytes
    head_stop = header_bytes(reader.read(ByteRange(0, LENGTH_BYTES)), size)
    plan = parse_payload(reader.read(ByteRange(0, head_stop)), size)
    destinations = Destinations(plan, reader.read(plan.objects), target.leaves)
    if not target.fits(destinations.saved):
        return None
    begins()
    done, tier = 0, TierName.NODE
    for segment in segments_of(size, reader.ring.capacity_bytes):
        data, tier = reader.fetch(segment)
        done += destinations.put(segment.start, data)
    if done != destinations.wanted_bytes:
        raise CorruptionError(
            f"{done} bytes of the payload belong to tensors of the state, expected "
            f"{destinations.wanted_bytes}"
        )
    return destinations.saved, tier
