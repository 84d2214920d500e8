"""Digests of a payload, and verification of a shard file, in one pass over a stream. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast_core.errors import CorruptionError, SwappedError
from holdfast_core.format.canonical import Blake3, crc32c
from holdfast_core.ids import Digest, ShardRef
from holdfast_core.shards.file import (
    HEAD_PREFIX,
    ChunkTable,
    ShardHeader,
    ShardRecord,
    Trailer,
    check_trailer,
    expect_zeros,
    file_bytes,
    head_bytes_of,
    record_of,
    trailer_offset,
    unpack_head,
    unpack_trailer,
)

_CACHED_BYTES = 512 << 10
"""Slice size for digests. Both digests process a slice before the next, so that the second one finds it
in the processor's cache."""


class Digester(Protocol):
    """Digester of a payload that arrives in order, in pieces of any size."""

    def update(self, data: memoryview) -> None: ...

    def finish(self) -> tuple[ShardRecord, ChunkTable]:
        """Return record and chunk table. Called once, after the last piece."""
        ...


class ChunkCrcs:
    """Digester that computes the CRC32C of each chunk. Pieces arrive in order and have any size."""

    __slots__ = ("_chunk_bytes", "_current", "_filled", "complete")

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._current = 0
        self._filled = 0
        self.complete: list[int] = []
        """CRCs of the chunks that have arrived completely."""

    def update(self, data: memoryview) -> None:
        position = 0
        while position < len(data):
            piece = data[position : position + self._chunk_bytes - self._filled]
            self._current = crc32c(piece, self._current)
            self._filled += len(piece)
            position += len(piece)
            if self._filled == self._chunk_bytes:
                self._close_chunk()

    def finish(self) -> tuple[int, ...]:
        """Return the CRCs of all chunks. The last chunk may be shorter."""
        if self._filled:
            self._close_chunk()
        return tuple(self.complete)

    def _close_chunk(self) -> None:
        self.complete.append(self._current)
        self._current = 0
        self._filled = 0


class TableDigester:
    """Digester that computes a chunk table. Pieces arrive in order and have any size."""

    __slots__ = ("_blake3", "_chunk_bytes", "_crcs", "_digests", "_filled")

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._blake3 = Blake3()
        """State of the current chunk."""
        self._crcs = ChunkCrcs(chunk_bytes)
        self._digests = bytearray()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        position = 0
        while position < len(data):
            room = min(self._chunk_bytes - self._filled, _CACHED_BYTES)
            piece = data[position : position + room]
            self._blake3.update(piece)
            self._crcs.update(piece)
            self._filled += len(piece)
            position += len(piece)
            if self._filled == self._chunk_bytes:
                self._close_chunk()

    def finish(self) -> tuple[Digest, ChunkTable]:
        """Return the payload's digest and the chunk table. Called once, after the last piece."""
        if self._filled:
            self._close_chunk()
        table = ChunkTable(self._crcs.finish(), bytes(self._digests))
        return table.payload_digest(), table

    def _close_chunk(self) -> None:
        self._filled = 0
        self._digests += self._blake3.raw()
        self._blake3 = Blake3()


class PayloadDigester:
    """Digester of a shard's payload."""

    __slots__ = ("_header", "_table")

    def __init__(self, header: ShardHeader) -> None:
        self._header = header
        self._table = TableDigester(header.chunk_bytes)

    def update(self, data: memoryview) -> None:
        self._table.update(data)

    def finish(self) -> tuple[ShardRecord, ChunkTable]:
        digest, table = self._table.finish()
        return record_of(self._header, digest, table), table


class ShardStream:
    """Verifier of a shard file that arrives in order, in pieces of any size.

    The identity is verified when the head is complete, the digests when the file is. A CorruptionError
    means that this copy is bad; a FormatError means that a newer release wrote it.
    """

    __slots__ = (
        "_buffered",
        "_digester",
        "_expected_bytes",
        "_header",
        "_make_digester",
        "_position",
        "_ref",
        "_stop",
    )

    def __init__(
        self,
        ref: ShardRef,
        expected_bytes: int,
        digester: Callable[[ShardHeader], Digester] = PayloadDigester,
    ) -> None:
        """Create a verifier.

        Args:
            ref: The shard that the file must be.
            expected_bytes: Length of the file that the sender announced.
            digester: Creates the digester of the payload. The digester may use a piece after `feed` has
                returned, until `finish`.
        """
        self._ref = ref
        self._expected_bytes = expected_bytes
        self._buffered = bytearray()
        self._position = 0
        self._stop = HEAD_PREFIX.size
        self._header: ShardHeader | None = None
        self._make_digester = digester
        self._digester: Digester | None = None

    @property
    def position(self) -> int:
        """Number of bytes of the file received so far."""
        return self._position

    @property
    def at_payload(self) -> bool:
        """Whether the head is complete and no byte of the payload has arrived."""
        return self._header is not None and self._position == self._stop

    def feed(self, data: memoryview) -> None:
        """Take the next bytes of the file. Raises CorruptionError, FormatError."""
        if self._position + len(data) > self._expected_bytes:
            raise CorruptionError(
                f"shard of {self._ref}: received more than the announced {self._expected_bytes} "
                "bytes"
            )
        taken = 0
        while taken < len(data):
            if self._header is None or self._digester is None:
                taken += self._feed_head(data[taken:])
            else:
                taken += self._feed_body(self._header, self._digester, data[taken:])

    def finish(self) -> Trailer:
        """Return the trailer. Raises CorruptionError unless the file is complete and is the shard."""
        if self._header is None or self._digester is None:
            raise CorruptionError(f"shard of {self._ref}: the stream ends within the head")
        if self._position != self._expected_bytes:
            raise CorruptionError(
                f"shard of {self._ref}: {self._position} bytes of {self._expected_bytes}"
            )
        record, table = self._digester.finish()
        trailer = unpack_trailer(bytes(self._buffered))
        check_trailer(self._header, trailer, self._expected_bytes)
        check_same(record, table, trailer)
        check_ref(trailer.record, self._ref)
        return trailer

    def _feed_head(self, data: memoryview) -> int:
        piece = data[: self._stop - len(self._buffered)]
        self._buffered += piece
        self._position += len(piece)
        if len(self._buffered) < self._stop:
            return len(piece)
        if self._stop == HEAD_PREFIX.size:
            self._stop = head_bytes_of(self._buffered)
            return len(piece)
        header = unpack_head(bytes(self._buffered))
        check_identity(header, self._ref)
        if file_bytes(header) != self._expected_bytes:
            raise CorruptionError(
                f"shard of {self._ref}: its head describes {file_bytes(header)} bytes, expected "
                f"the announced {self._expected_bytes}"
            )
        self._header = header
        self._digester = self._make_digester(header)
        self._buffered.clear()
        return len(piece)

    def _feed_body(self, header: ShardHeader, digester: Digester, data: memoryview) -> int:
        payload_start = self._stop
        payload_stop = payload_start + header.payload_bytes
        if self._position < payload_stop:
            piece = data[: payload_stop - self._position]
            digester.update(piece)
        elif self._position < trailer_offset(header):
            piece = data[: trailer_offset(header) - self._position]
            expect_zeros(piece, f"shard of {self._ref}")
        else:
            piece = data
            self._buffered += piece
        self._position += len(piece)
        return len(piece)


def check_identity(header: ShardHeader, ref: ShardRef) -> None:
    """Raise SwappedError if the header is not that of `ref`, as in a renamed or misdirected file."""
    found = (header.job_uid, header.step, header.round, header.rank)
    expected = (ref.job_uid, ref.step, ref.round, ref.rank)
    if found != expected:
        raise SwappedError(
            f"shard: the file has (job, step, round, rank) = {found}, expected {expected}"
        )


def check_ref(record: ShardRecord, ref: ShardRef) -> None:
    """Raise SwappedError if the record is not the shard `ref`."""
    check_identity(record.header, ref)
    if record.blake3 != ref.blake3:
        raise SwappedError(f"shard of {ref}: the file names the payload {record.blake3}")


def check_same(record: ShardRecord, table: ChunkTable, trailer: Trailer) -> None:
    """Raise CorruptionError if the computed digests differ from those of the trailer."""
    if table.crcs != trailer.table.crcs:
        pairs = zip(table.crcs, trailer.table.crcs, strict=True)
        bad = [i for i, (a, b) in enumerate(pairs) if a != b]
        raise CorruptionError(
            f"shard of {trailer.record.ref}: CRC32C of chunks {bad[:8]} does not match"
        )
    if record.blake3 != trailer.record.blake3:
        raise CorruptionError(
            f"shard of {trailer.record.ref}: the digest of the payload is {record.blake3}"
        )
