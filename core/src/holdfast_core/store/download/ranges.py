"""Plan of a shard's download: which bytes are fetched together, and their CRC32C. Pure functions.

The whole plan follows from the trailer: the head repeats the identity, the chunk table has the CRC32C of
each payload chunk, and the padding is zeros. Each range can therefore be verified when it arrives, in any
order and from any object.
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
    """Bytes of the shard file that are verified together, and fetched again together if they are wrong."""

    span: ByteRange
    """Range in the shard file."""
    crc32c: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive chunks that one object stores consecutively."""

    chunks: range
    key: str
    offset: int
    """Where the first chunk begins in the object."""
    coding: Coding | None = None
    """How these chunks are compressed; None if they are not."""

    def cut(self, chunks: range, chunk_bytes: int) -> Extent:
        """Return the extent of some of these chunks, which must be consecutive."""
        first, stop = (at - self.chunks.start for at in (chunks.start, chunks.stop))
        if self.coding is None:
            return Extent(chunks, self.key, self.offset + first * chunk_bytes)
        skipped = self.coding.stored_bytes(0, first)
        return Extent(chunks, self.key, self.offset + skipped, self.coding.cut(first, stop))


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive segments that are fetched with one request."""

    segments: tuple[Segment, ...]
    key: str | None = None
    """Key of the object that stores them; None for the shard file, which begins at offset 0."""
    offset: int = 0
    """Where the segments begin in the object that `key` names; unused if `key` is None."""
    coding: Coding | None = None
    """How the segments, one chunk each, are compressed; None if they are not."""

    @property
    def span(self) -> ByteRange:
        """Range in the shard file."""
        return ByteRange(self.segments[0].span.start, self.segments[-1].span.stop)


def plan_pieces(trailer: Trailer, piece_bytes: int) -> Iterator[Piece]:
    """Cut a shard file, without its trailer, into pieces of at most `longest_piece` bytes, in order."""
    current: list[Segment] = []
    for segment in _segments(trailer):
        if current and segment.span.stop - current[0].span.start > piece_bytes:
            yield Piece(tuple(current))
            current = []
        current.append(segment)
    yield Piece(tuple(current))


def plan_extents(trailer: Trailer, extents: Iterable[Extent], piece_bytes: int) -> Iterator[Piece]:
    """Cut the payload into pieces of one extent and at most `longest_piece` bytes each, in order."""
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
    """Return the greatest possible length of a piece: `piece_bytes`, or a chunk or the head if longer."""
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
