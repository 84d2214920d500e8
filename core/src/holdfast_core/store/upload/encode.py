"""A pack whose chunks are compressed, as parts that are made while others are sent.

The bytes of a part are known only when its chunks have been read, verified and compressed, so nothing
of the plan is known before the last one: lengths and widths, the index, the checksum of the whole.
One pass, one thread: compression takes at most one core beside training.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast_core.format.digest import append_crc, crc32c
from holdfast_core.ids import ByteRange
from holdfast_core.shards.coding import PLAIN, ChunkEncoder, Coding
from holdfast_core.shards.pack import HERE, PackIndex, pack_index
from holdfast_core.store.upload.parts import MAX_PARTS, MIN_PART_BYTES, Part, PartPlan
from holdfast_core.tiers.base import ShardReader

MAX_HELD_BYTES = 48 << 20
"""Of one upload: parts that are made, wait, or are being sent. As much as a download holds."""
_BEING_MADE = 2
"""Parts of memory that the making of one takes: what is collected, and the part cut off it."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PartSizes:
    part_bytes: int
    at_once: int
    """Parts that may wait or be on their way while another is made."""


def part_sizes(payload_bytes: int, part_bytes: int, at_once: int) -> PartSizes:
    """At most `part_bytes` and `at_once`, less where these would take more than MAX_HELD_BYTES; longer
    parts where the payload as it is would be more than 10,000, which alone takes more memory."""
    fitting = MAX_HELD_BYTES // (at_once + _BEING_MADE) // _MIB * _MIB
    # Little of a pack is index: 43 bytes for each chunk of 256 KiB.
    least = -(-(payload_bytes + payload_bytes // 1024) // (MAX_PARTS - 1) // _MIB) * _MIB
    chosen = max(MIN_PART_BYTES, least, min(part_bytes, fitting))
    return PartSizes(chosen, max(1, min(at_once, MAX_HELD_BYTES // chosen - _BEING_MADE)))


@dataclass(frozen=True, slots=True)
class EncodedPart:
    part: Part
    body: bytes
    is_last: bool


class EncodedPack:
    """Makes the parts of one pack, once."""

    def __init__(
        self, reader: ShardReader, index: PackIndex, widths: bytes, part_bytes: int
    ) -> None:
        """`index`: what is stored here and what is not; its coding is made. `widths`: one a chunk of
        the payload."""
        self._reader = reader
        self._widths = widths
        self._part_bytes = part_bytes
        self._parts: list[Part] = []
        self._crc = 0
        self.index = index
        """With its coding, when all parts have been made."""

    @property
    def plan(self) -> PartPlan:
        """When all parts have been made."""
        return PartPlan(tuple(self._parts), self._parts[-1].span.stop, self._crc)

    def parts(self) -> Iterator[EncodedPart]:
        """All but the last of `part_bytes`. Raises CorruptionError where a chunk on the node is not
        what the table says."""
        ready = bytearray()
        for data in self._bytes():
            ready += data
            # Only when more has come: what is left at the end is the last part.
            while len(ready) > self._part_bytes:
                yield self._part(bytes(memoryview(ready)[: self._part_bytes]), is_last=False)
                del ready[: self._part_bytes]
        yield self._part(bytes(ready), is_last=True)

    def _part(self, body: bytes, *, is_last: bool) -> EncodedPart:
        start = len(self._parts) * self._part_bytes
        crc = crc32c(body)
        part = Part(len(self._parts) + 1, ByteRange(start, start + len(body)), crc)
        self._parts.append(part)
        self._crc = append_crc(self._crc, crc, len(body))
        return EncodedPart(part, body, is_last)

    def _bytes(self) -> Iterator[bytes]:
        header = self._reader.record.header
        size, total = header.chunk_bytes, header.payload_bytes
        encoder, buffer = ChunkEncoder(), memoryview(bytearray(min(size, total)))
        count = len(self.index.places)
        lengths, widths = array("I", bytes(4 * count)), bytearray(count)
        for chunk, place in enumerate(self.index.places):
            if place != HERE:
                continue
            view = buffer[: min(size, total - chunk * size)]
            self._reader.read_payload_into(chunk * size, view)
            data, width = bytes(view), self._widths[chunk]
            coded = encoder.encode(data, width)
            if coded is None:
                coded, width = data, PLAIN
            lengths[chunk], widths[chunk] = len(coded), width
            yield coded
        coding = Coding.of(lengths, bytes(widths)) if any(widths) else None
        self.index = replace(self.index, coding=coding)
        yield pack_index(self.index)
