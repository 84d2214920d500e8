"""Which bytes of a shard in the store are fetched together, and the CRC32C that each must have. Pure.

Everything follows from the trailer: the head is the identity once more, the payload is the chunk
table's, and the padding is zeros. So each range can be verified as it arrives, in any order, and
from wherever its chunks are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast_core.format.digest import crc32c
from holdfast_core.ids import ByteRange
from holdfast_core.shards.coding import Coding
from holdfast_core.shards.file import Trailer, head_bytes, pack_head, trailer_offset


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of the file that are verified, and fetched again, as one."""

    span: ByteRange
    crc32c: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Chunks in a row that one object stores in a row."""

    chunks: range
    key: str
    offset: int
    """Of the first of them in the object."""
    coding: Coding | None = None
    """Of these chunks; None: they are stored as they are."""

    def cut(self, chunks: range, chunk_bytes: int) -> Extent:
        """Some of them, in a row."""
        first, stop = (at - self.chunks.start for at in (chunks.start, chunks.stop))
        if self.coding is None:
            return Extent(chunks, self.key, self.offset + first * chunk_bytes)
        skipped = self.coding.stored_bytes(0, first)
        return Extent(chunks, self.key, self.offset + skipped, self.coding.cut(first, stop))


@dataclass(frozen=True, slots=True)
class Piece:
    """Segments that follow each other and are asked for with one request."""

    segments: tuple[Segment, ...]
    key: str | None = None
    """The object that stores them; None: the shard file itself."""
    offset: int = 0
    """Where they begin in that object."""
    coding: Coding | None = None
    """Each segment is a chunk that is stored like this; None: as it is."""

    @property
    def span(self) -> ByteRange:
        return ByteRange(self.segments[0].span.start, self.segments[-1].span.stop)


def plan_pieces(trailer: Trailer, piece_bytes: int) -> Iterator[Piece]:
    """The file up to its trailer in pieces of at most `longest_piece` bytes."""
    current: list[Segment] = []
    for segment in _segments(trailer):
        if current and segment.span.stop - current[0].span.start > piece_bytes:
            yield Piece(tuple(current))
            current = []
        current.append(segment)
    yield Piece(tuple(current))


def plan_extents(trailer: Trailer, extents: Iterable[Extent], piece_bytes: int) -> Iterator[Piece]:
    """The payload, in order, in pieces of at most `longest_piece` bytes of one extent each."""
    header = trailer.record.header
    start, size = head_bytes(header), header.chunk_bytes
    stop = start + header.payload_bytes
    count = max(1, piece_bytes // size)
    for extent in extents:
        for first in range(extent.chunks.start, extent.chunks.stop, count):
            chunks = range(first, min(first + count, extent.chunks.stop))
            segments = tuple(
                Segment(
                    ByteRange(start + chunk * size, min(start + (chunk + 1) * size, stop)),
                    trailer.table.crcs[chunk],
                )
                for chunk in chunks
            )
            part = extent.cut(chunks, size)
            yield Piece(segments, part.key, part.offset, part.coding)


def longest_piece(trailer: Trailer, piece_bytes: int) -> int:
    """`piece_bytes`, or a whole chunk or the head where that alone is longer."""
    header = trailer.record.header
    return max(piece_bytes, min(header.chunk_bytes, header.payload_bytes), head_bytes(header))


def _segments(trailer: Trailer) -> Iterator[Segment]:
    header = trailer.record.header
    head = pack_head(header)
    yield Segment(ByteRange(0, len(head)), crc32c(head))
    stop = len(head) + header.payload_bytes
    for index, crc in enumerate(trailer.table.crcs):
        start = len(head) + index * header.chunk_bytes
        yield Segment(ByteRange(start, min(start + header.chunk_bytes, stop)), crc)
    padding = trailer_offset(header) - stop
    if padding:
        yield Segment(ByteRange(stop, stop + padding), crc32c(bytes(padding)))
