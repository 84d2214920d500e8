"""Encoding of a pack with compressed chunks into parts, while earlier parts are being sent.

The bytes of a part are known only after its chunks have been read, verified and compressed. The stored
lengths and widths, the index and the checksum of the whole object are therefore known only with the last
part. Encoding is one pass on one thread, so compression takes at most one core from training.
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
"""Memory limit of one upload: the parts that are being made, wait, or are being sent. A download has the
same limit (download.shard.MAX_AHEAD_BYTES)."""
_BEING_MADE = 2
"""Memory to make one part, in parts: the collected bytes, and the part that is copied from them."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Sizes that keep one upload within its memory limit."""

    part_bytes: int
    """Length of every part but the last."""
    at_once: int
    """Parts that may wait or be in flight while another one is made."""


def part_sizes(payload_bytes: int, part_bytes: int, at_once: int) -> PartSizes:
    """Return the part length and the number of concurrent parts for an upload.

    Both values are reduced where an upload would hold more than MAX_HELD_BYTES. Parts are longer than
    `part_bytes` where the uncompressed payload would need more than 10,000 parts; only such an upload
    may hold more than MAX_HELD_BYTES.

    Args:
        payload_bytes: Payload bytes that the pack stores, before compression.
        part_bytes: Preferred length of a part.
        at_once: Preferred number of parts in flight.
    """
    fitting = MAX_HELD_BYTES // (at_once + _BEING_MADE) // _MIB * _MIB
    # 1/1024 of the payload is room for the index, which takes 43 bytes for each chunk of 256 KiB.
    least = -(-(payload_bytes + payload_bytes // 1024) // (MAX_PARTS - 1) // _MIB) * _MIB
    chosen = max(MIN_PART_BYTES, least, min(part_bytes, fitting))
    return PartSizes(chosen, max(1, min(at_once, MAX_HELD_BYTES // chosen - _BEING_MADE)))


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One part of an encoded pack, with its bytes."""

    part: Part
    body: bytes
    is_last: bool


class EncodedPack:
    """Encoder of one pack. Its parts can be made once."""

    def __init__(
        self, reader: ShardReader, index: PackIndex, widths: bytes, part_bytes: int
    ) -> None:
        """Create the encoder.

        Args:
            reader: The shard on the node.
            index: Which chunks the pack stores. Its coding is ignored and made anew.
            widths: Element width in bytes for each chunk of the payload.
            part_bytes: Length of every part but the last.
        """
        self._reader = reader
        self._widths = widths
        self._part_bytes = part_bytes
        self._parts: list[Part] = []
        self._crc = 0
        self.index = index
        """Index of the pack. It has its coding only after all parts have been made."""

    @property
    def plan(self) -> PartPlan:
        """The plan of the whole object. It is complete only after all parts have been made."""
        return PartPlan(tuple(self._parts), self._parts[-1].span.stop, self._crc)

    def parts(self) -> Iterator[EncodedPart]:
        """Make the parts, in order.

        Raises CorruptionError if a chunk on the node does not match the chunk table.
        """
        ready = bytearray()
        for data in self._bytes():
            ready += data
            # The comparison is strict: bytes must be left at the end for the last part.
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
