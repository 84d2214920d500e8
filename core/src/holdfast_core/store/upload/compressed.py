"""A pack with compressed chunks as the source of an object.

The bytes of a part are known only after its chunks have been read, verified and compressed. The stored
lengths and widths, the index and the checksum of the whole object are therefore known only with the last
part. Compression is one pass on one thread, so it takes at most one core from training. Its output is
deterministic, so an interrupted upload can be continued.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

from holdfast_core.format.digest import crc32c
from holdfast_core.shards.coding import PLAIN, ChunkEncoder, Coding
from holdfast_core.shards.pack import HERE, PackIndex, pack_index
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.objects import Part


class CompressedPack:
    """ObjectSource of a pack with compressed chunks. A part is in memory until its user drops it."""

    made_while_sent = True

    def __init__(self, reader: ShardReader, index: PackIndex, widths: bytes) -> None:
        """Create the source.

        Args:
            reader: The shard on the node.
            index: Which chunks the pack stores. Its coding is ignored and made anew.
            widths: Element width in bytes for each chunk of the payload.
        """
        self._reader = reader
        self._widths = widths
        self.index = index
        """Index of the pack. It has its coding only after all parts have been made."""

    @property
    def size_limit(self) -> int:
        payload_bytes = self.index.payload_bytes_here
        # 1/1024 of the payload is room for the index, which takes 43 bytes for each chunk of 256 KiB.
        return payload_bytes + payload_bytes // 1024

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Make the parts, in order.

        Raises CorruptionError if a chunk on the node does not match the chunk table.
        """
        ready = bytearray()
        for data in self._bytes():
            ready += data
            # The comparison is strict: bytes must be left at the end for the last part.
            while len(ready) > part_bytes:
                yield _part(bytes(memoryview(ready)[:part_bytes]), is_last=False)
                del ready[:part_bytes]
        yield _part(bytes(ready), is_last=True)

    def verify(self) -> None:
        self._reader.verify()

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


def _part(data: bytes, *, is_last: bool) -> Part:
    return Part((data,), len(data), crc32c(data), is_last)
