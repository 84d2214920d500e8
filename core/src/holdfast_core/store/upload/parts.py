"""Which bytes of a shard file go up as which part, and the CRC32C of each, without a second pass.

The chunk table already holds the CRC32C of every payload chunk, computed when the tensors were
first read. Combined, they are the checksum that the store must find: a bit that flipped on the
node's disk since then is refused by the store instead of being blessed by a fresh checksum. Of a
chunk that a part boundary cuts, the longest piece is not read either: its checksum is what the
chunk's leaves for it, so a flipped bit in any of the pieces still shows. Knows no store, no network.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.errors import CorruptionError
from holdfast_core.format.digest import append_crc, crc32c
from holdfast_core.ids import ByteRange
from holdfast_core.shards.file import head_bytes
from holdfast_core.tiers.base import ShardReader

MIN_PART_BYTES = 5 << 20
MAX_PARTS = 10_000
_MIB = 1 << 20
_ORDER = 2**31 - 1
"""So many zero bytes leave every CRC32C as it is; appending the rest of them takes some away."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a multipart upload; all but the last are equally long (some stores insist)."""

    number: int
    """From 1."""
    span: ByteRange
    """Of the shard file."""
    crc32c: int


@dataclass(frozen=True, slots=True)
class PartPlan:
    """A whole shard file as parts."""

    parts: tuple[Part, ...]
    size_bytes: int
    crc32c: int
    """Of the whole file."""


def part_spans(size_bytes: int, part_bytes: int) -> tuple[ByteRange, ...]:
    """Cuts a file into parts of `part_bytes`, longer where 10,000 would not be enough."""
    least = -(-size_bytes // MAX_PARTS)
    if least > part_bytes:
        part_bytes = -(-least // _MIB) * _MIB
    starts = range(0, max(size_bytes, 1), part_bytes)
    return tuple(ByteRange(start, min(start + part_bytes, size_bytes)) for start in starts)


def plan_parts(reader: ShardReader, part_bytes: int) -> PartPlan:
    """Parts of an open shard with their checksums. Reads head and trailer, and of each chunk that a
    part boundary cuts all but the longest piece. Raises CorruptionError where the file is short."""
    size = reader.record.file_bytes
    spans = part_spans(size, part_bytes)
    sums = _FileChecksums(reader, [span.start for span in spans])
    parts: list[Part] = []
    whole = 0
    for number, span in enumerate(spans, start=1):
        crc = sums.of(span)
        whole = append_crc(whole, crc, span.length_bytes)
        parts.append(Part(number, span, crc))
    return PartPlan(tuple(parts), size, whole)


def crc_between(whole: int, before: int, length_between: int, after: int, length_after: int) -> int:
    """CRC32C of M, from those of A + M + B, of A and of B, and the lengths of M and B in bytes."""
    without_after = append_crc(whole ^ after, 0, _ORDER - length_after % _ORDER)
    return append_crc(before, without_after, length_between)


class _FileChecksums:
    """CRC32C of any part of the shard file; `starts` are those of all parts, in order."""

    def __init__(self, reader: ShardReader, starts: Sequence[int]) -> None:
        self._reader = reader
        self._starts = starts
        header = reader.record.header
        self._chunk_bytes = header.chunk_bytes
        start = head_bytes(header)
        self._payload = ByteRange(start, start + header.payload_bytes)
        self._cut: dict[ByteRange, int] = {}

    def of(self, span: ByteRange) -> int:
        crc, position = 0, span.start
        while position < span.stop:
            piece = self._piece(position, span.stop)
            crc = append_crc(crc, self._crc(piece), piece.length_bytes)
            position = piece.stop
        return crc

    def _piece(self, start: int, limit: int) -> ByteRange:
        """The longest piece from `start` that lies in one chunk, or outside of the payload."""
        payload = self._payload
        if start < payload.start:
            return ByteRange(start, min(limit, payload.start))
        if start >= payload.stop:
            return ByteRange(start, limit)
        return ByteRange(start, min(self._chunk(start).stop, limit))

    def _chunk(self, position: int) -> ByteRange:
        start = position - (position - self._payload.start) % self._chunk_bytes
        return ByteRange(start, min(start + self._chunk_bytes, self._payload.stop))

    def _crc(self, piece: ByteRange) -> int:
        if not self._payload.start <= piece.start < self._payload.stop:
            return self._read(piece)
        chunk = self._chunk(piece.start)
        if piece == chunk:
            return self._table(chunk)
        if piece not in self._cut:
            self._cut = self._pieces(chunk)  # its other pieces are asked for next
        return self._cut[piece]

    def _table(self, chunk: ByteRange) -> int:
        return self._reader.table.crcs[(chunk.start - self._payload.start) // self._chunk_bytes]

    def _pieces(self, chunk: ByteRange) -> dict[ByteRange, int]:
        """Each piece of a chunk that part boundaries cut; together they are the chunk's CRC."""
        first, last = (
            bisect.bisect_right(self._starts, at) for at in (chunk.start, chunk.stop - 1)
        )
        cuts = [chunk.start, *self._starts[first:last], chunk.stop]
        pieces = [ByteRange(start, stop) for start, stop in itertools.pairwise(cuts)]
        longest = max(pieces, key=lambda piece: piece.length_bytes)
        at = pieces.index(longest)
        crcs = {piece: self._read(piece) for piece in pieces if piece != longest}
        before, after = self._joined(pieces[:at], crcs), self._joined(pieces[at + 1 :], crcs)
        length_after = chunk.stop - longest.stop
        crcs[longest] = crc_between(
            self._table(chunk), before, longest.length_bytes, after, length_after
        )
        return crcs

    def _joined(self, pieces: Sequence[ByteRange], crcs: Mapping[ByteRange, int]) -> int:
        crc = 0
        for piece in pieces:
            crc = append_crc(crc, crcs[piece], piece.length_bytes)
        return crc

    def _read(self, span: ByteRange) -> int:
        crc, position = 0, span.start
        while position < span.stop:
            data = os.pread(self._reader.fd, min(span.stop - position, _MIB), position)
            if not data:
                raise CorruptionError(
                    f"shard file {self._reader.record.ref}: ends at byte {position}, "
                    f"expected {self._reader.record.file_bytes} bytes"
                )
            crc = crc32c(data, crc)
            position += len(data)
        return crc
