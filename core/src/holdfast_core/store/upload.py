"""Sources of an object: a document, a whole shard file, a pack, and a pack with compressed chunks.

No second pass over the payload is made, and no network is used.

Of a compressed pack the bytes of a part are known only after its chunks have been read, verified and
compressed. The stored lengths and widths, the index and the checksum of the whole object are therefore known
only with the last part. Compression is one pass on one thread, so it takes at most one core from training.
Its output is deterministic, so an interrupted upload can be continued.

A pack without compression has runs of chunks of the shard file, and then the index. `shards.pack` decides
which chunks a pack leaves out, and `store.rules` which objects other checkpoints need.

Of a whole shard file the chunk table holds the CRC32C of every payload chunk, computed when the tensors were
first read. Their combination is the checksum that the store must find. If a bit has flipped on the node's
disk since then, the store refuses the part; a checksum that was computed from the file again would hide the
damage.

A part boundary may cut a chunk. All its pieces but the longest are then read. The checksum of the longest
piece is derived from the chunk's and those of the other pieces, so a flipped bit in any piece is found.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast_core.errors import CorruptionError, TierError
from holdfast_core.format.canonical import append_crc, crc32c
from holdfast_core.ids import ByteRange
from holdfast_core.shards.coding import ChunkEncoder
from holdfast_core.shards.file import head_bytes
from holdfast_core.shards.pack import HERE, PLAIN, Coding, PackIndex, pack_index
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.objects import FileRange, ObjectSource, Part, unreadable


@dataclass(frozen=True, slots=True)
class Document:
    """ObjectSource of bytes in memory."""

    data: bytes
    made_while_sent: bool = False

    @property
    def size_limit(self) -> int:
        return len(self.data)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        for start in range(0, max(1, len(self.data)), part_bytes):
            data = self.data[start : start + part_bytes]
            is_last = start + part_bytes >= len(self.data)
            yield Part((data,), len(data), crc32c(data), is_last)

    def verify(self) -> None:
        """Do nothing: bytes in memory have no checksum from before."""


class WhileWanted:
    """ObjectSource of another source, of which no part is made any more once `over` is set.

    The upload of gigabytes cannot be cancelled otherwise, and would take bandwidth from later ones.
    """

    def __init__(self, source: ObjectSource, over: threading.Event) -> None:
        self._source = source
        self._over = over
        self.made_while_sent = source.made_while_sent
        self._made: dict[int, tuple[Part, ...]] = {}
        """Parts of a file, by their length: a store needs their checksums first and then sends them, and
        making them reads the file."""

    @property
    def size_limit(self) -> int:
        return self._source.size_limit

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Return the parts. Raises TierError, which no store retries, when `over` is set."""
        # A generator would refer to the last part, and keep its bytes while the next one is made.
        if self.made_while_sent:
            return map(self._wanted, self._source.parts(part_bytes))
        if part_bytes not in self._made:
            self._made[part_bytes] = tuple(self._source.parts(part_bytes))
        return map(self._wanted, self._made[part_bytes])

    def _wanted(self, part: Part) -> Part:
        if self._over.is_set():
            raise TierError("the upload was ended before its last part")
        return part

    def verify(self) -> None:
        self._source.verify()


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


class PlainPack:
    """ObjectSource of a pack. Each part consists of runs of chunks; the index comes last.

    Part boundaries lie on chunk boundaries, so the checksums follow from the chunk table and no payload
    is read to compute them.
    """

    made_while_sent = False

    def __init__(self, reader: ShardReader, index: PackIndex) -> None:
        """`reader` is the shard on the node. Raises FormatError for an index that a reader would refuse."""
        self._reader = reader
        self._index = index
        self._tail = pack_index(index)

    @property
    def size_limit(self) -> int:
        return self._index.stored_bytes + len(self._tail)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Make the parts. They are `part_bytes` long, rounded up to whole chunks."""
        index, tail = self._index, self._tail
        size, stored, total = index.header.chunk_bytes, index.stored_bytes, self.size_limit
        part_bytes = -(-part_bytes // size) * size
        chunks = [chunk for run in index.runs() if run.place == HERE for chunk in run.chunks]
        for start in range(0, total, part_bytes):
            stop = min(start + part_bytes, total)
            inside = chunks[start // size : -(-min(stop, stored) // size)]
            after = tail[max(0, start - stored) : max(0, stop - stored)]
            files = tuple(self._file_ranges(inside))
            crc = self._checksum(inside, after)
            yield Part((*files, after) if after else files, stop - start, crc, stop == total)

    def verify(self) -> None:
        self._reader.verify()

    def _file_ranges(self, chunks: Sequence[int]) -> Iterator[FileRange]:
        header = self._index.header
        first = head_bytes(header)
        start = 0
        for at in range(1, len(chunks) + 1):
            if at == len(chunks) or chunks[at] != chunks[at - 1] + 1:
                offset = chunks[start] * header.chunk_bytes
                stop = min((chunks[at - 1] + 1) * header.chunk_bytes, header.payload_bytes)
                yield FileRange(self._reader.fd, first + offset, stop - offset)
                start = at

    def _checksum(self, chunks: Sequence[int], after: bytes) -> int:
        header, crc = self._index.header, 0
        for chunk in chunks:
            length = min(header.chunk_bytes, header.payload_bytes - chunk * header.chunk_bytes)
            crc = append_crc(crc, self._index.table.crcs[chunk], length)
        return append_crc(crc, crc32c(after), len(after))


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
            try:
                data = os.pread(self._reader.fd, min(span.stop - position, _MIB), position)
            except OSError as error:
                raise unreadable(error) from error
            if not data:
                raise CorruptionError(
                    f"shard file {self._reader.record.ref}: ends at byte {position}, "
                    f"expected {self._reader.record.file_bytes} bytes"
                )
            crc = crc32c(data, crc)
            position += len(data)
        return crc
