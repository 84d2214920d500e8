"""A whole shard file as the source of an object, without a second pass over the payload.

The chunk table holds the CRC32C of every payload chunk, computed when the tensors were first read. Their
combination is the checksum that the store must find. If a bit has flipped on the node's disk since then,
the store refuses the part; a checksum that was computed from the file again would hide the damage.

A part boundary may cut a chunk. All its pieces but the longest are then read. The checksum of the longest
piece is derived from the chunk's and those of the other pieces, so a flipped bit in any piece is found.
This module does not use the network.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

from holdfast_core.errors import CorruptionError
from holdfast_core.format.digest import append_crc, crc32c
from holdfast_core.ids import ByteRange
from holdfast_core.shards.file import head_bytes
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.objects import FileRange, Part

_MIB = 1 << 20
_ORDER = 2**31 - 1
"""`append_crc(crc, 0, _ORDER)` returns `crc` for every CRC32C, so that
`append_crc(crc, 0, _ORDER - n)` reverses `append_crc(crc, 0, n)`."""


class WholeShard:
    """ObjectSource of a whole shard file."""

    made_while_sent = False

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader

    @property
    def size_limit(self) -> int:
        return self._reader.record.file_bytes

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Make the parts of `part_bytes` each.

        This reads the head and the trailer, and all but the longest piece of each chunk that a part
        boundary cuts. Raises CorruptionError if the file is too short.
        """
        size = self._reader.record.file_bytes
        starts = range(0, size, part_bytes)
        sums = _FileChecksums(self._reader, starts)
        for start in starts:
            span = ByteRange(start, min(start + part_bytes, size))
            piece = FileRange(self._reader.fd, span.start, span.length_bytes)
            yield Part((piece,), span.length_bytes, sums.of(span), span.stop == size)

    def verify(self) -> None:
        self._reader.verify()


def crc_between(whole: int, before: int, length_between: int, after: int, length_after: int) -> int:
    """Return the CRC32C of the middle M of three byte strings A + M + B.

    Args:
        whole: CRC32C of A + M + B.
        before: CRC32C of A.
        length_between: Length of M in bytes.
        after: CRC32C of B.
        length_after: Length of B in bytes.
    """
    without_after = append_crc(whole ^ after, 0, _ORDER - length_after % _ORDER)
    return append_crc(before, without_after, length_between)


class _FileChecksums:
    """CRC32C of the parts of one shard file."""

    def __init__(self, reader: ShardReader, starts: Sequence[int]) -> None:
        """`starts` are the file offsets of all parts, in order."""
        self._reader = reader
        self._starts = starts
        header = reader.record.header
        self._chunk_bytes = header.chunk_bytes
        start = head_bytes(header)
        self._payload = ByteRange(start, start + header.payload_bytes)
        self._cut: dict[ByteRange, int] = {}

    def of(self, span: ByteRange) -> int:
        """Return the CRC32C of one part. If the parts come in order, no byte is read twice."""
        crc, position = 0, span.start
        while position < span.stop:
            piece = self._piece(position, span.stop)
            crc = append_crc(crc, self._crc(piece), piece.length_bytes)
            position = piece.stop
        return crc

    def _piece(self, start: int, limit: int) -> ByteRange:
        """Return the longest piece from `start` on that lies in one chunk, or outside of the payload."""
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
            self._cut = self._pieces(chunk)  # Keep them: the chunk's other pieces are needed next.
        return self._cut[piece]

    def _table(self, chunk: ByteRange) -> int:
        return self._reader.table.crcs[(chunk.start - self._payload.start) // self._chunk_bytes]

    def _pieces(self, chunk: ByteRange) -> dict[ByteRange, int]:
        """Return the CRC32C of each piece of a chunk that is cut by part boundaries.

        Their combination is the chunk's CRC32C in the chunk table.
        """
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
