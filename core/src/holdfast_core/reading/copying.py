"""Executes a plan for one old rank's shard: reads verified chunks and writes their pieces.

The calls block and do not retry.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Protocol

from holdfast_core.errors import CorruptionError
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.ids import ByteRange
from holdfast_core.reshard.plan import Move
from holdfast_core.reshard.reads import READ_BYTES, Read, reads_of
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.sources import AHEAD_BYTES, ReaderSource


class PayloadSink(Protocol):
    """The new payload."""

    def write_payload(self, offset: int, data: memoryview) -> None:
        """Write `data` at payload offset `offset`."""
        ...


class Copying:
    """Copy of the parts of one old rank's shard that a new payload needs.

    If `take` fails, the caller may call it with another source of the same shard, which continues
    where the first one failed.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        """Create a copy. The moves are those of one old rank, in order of start."""
        self._moves = moves
        self._left: Iterator[Read] = iter(())
        self._chunk_bytes: int | None = None
        self.read_bytes = 0
        """Payload bytes read so far from all sources, in whole verified chunks."""

    def take(self, source: ShardSource, target: PayloadSink, limit_bytes: int = READ_BYTES) -> None:
        """Copy all bytes that are left from `source` to `target`.

        After an error, all bytes that were written come from verified chunks. A read has at most
        `limit_bytes`, but at least one chunk.

        Raises:
            CorruptionError: The source yields other bytes than requested.
            HoldfastError: An error of the source or the target.
        """
        header = source.trailer.record.header
        if header.chunk_bytes != self._chunk_bytes:
            # This is the first source, or an earlier source stated a wrong chunk size. Read from the
            # start in this source's chunks.
            self._chunk_bytes = header.chunk_bytes
            self._left = reads_of(
                self._moves, header.payload_bytes, header.chunk_bytes, limit_bytes
            )
        requested: deque[Read] = deque()

        def wanted() -> Iterator[range]:
            for read in self._left:
                requested.append(read)
                yield _chunks_of(read.span, header.chunk_bytes)

        try:
            with closing(source.read(wanted())) as views:
                for view in views:
                    read = requested[0]
                    if len(view) != read.span.length_bytes:
                        raise CorruptionError(
                            f"{source.trailer.record.ref}: received {len(view)} bytes for "
                            f"{read.span}"
                        )
                    self.read_bytes += len(view)
                    for piece in read.pieces:
                        data = view[piece.start : piece.start + piece.length_bytes]
                        target.write_payload(piece.target, data)
                    requested.popleft()
        finally:
            self._left = itertools.chain(requested, self._left)
        if (missed := next(self._left, None)) is not None:
            # A source that ends too early must not leave an unnoticed gap in the payload.
            self._left = itertools.chain((missed,), self._left)
            raise CorruptionError(
                f"{source.trailer.record.ref}: received no bytes for {missed.span}"
            )


def copy_span(source: ReaderSource, span: ByteRange, target: PayloadSink) -> None:
    """Copy a span of the payload of a shard file to the start of `target`.

    Raises CorruptionError, and what the source and the target raise.
    """
    move = Move(source.trailer.record.header.rank, span.start, span.length_bytes, 0)
    Copying([move]).take(source, target, AHEAD_BYTES)


def check_source(record: ShardRecord, shard: ManifestShard) -> None:
    """Raise CorruptionError if an open shard is not the one in the manifest.

    Reads of ranges do not verify the payload's digest, so the chunk table must be the manifest's.
    """
    header = record.header
    found = (header.rank, header.payload_bytes, header.layout, record.blake3, record.chunk_table)
    expected = (shard.rank, shard.payload_bytes, shard.layout, shard.blake3, shard.chunk_table)
    if found != expected:
        raise CorruptionError(
            f"shard of {record.ref}: its head and trailer have (rank, bytes, layout, blake3, chunk "
            f"table) = {found}, expected {expected} according to the manifest"
        )


def _chunks_of(span: ByteRange, chunk_bytes: int) -> range:
    """Return the chunks of `span`, which begins and ends on chunk boundaries or at the payload's end."""
    return range(span.start // chunk_bytes, -(-span.stop // chunk_bytes))
