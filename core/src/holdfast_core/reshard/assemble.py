"""Executes a plan for one old rank's shard: verified chunks in, pieces out. Blocks; no retries."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Protocol

from holdfast_core.errors import CorruptionError
from holdfast_core.format.layout import RankPart
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.ids import ByteRange
from holdfast_core.reshard.plan import Move
from holdfast_core.reshard.reads import READ_BYTES, Read, reads_of
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.record import ShardRecord


class Source(Protocol):
    """What is needed of a tiers.base.ShardSource."""

    @property
    def trailer(self) -> Trailer: ...

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]: ...


class Target(Protocol):
    """The new payload."""

    def write_payload(self, offset: int, data: memoryview) -> None: ...


class Copying:
    """What a payload still lacks of one old rank's shard. `take` from one source after another: each
    goes on where the one before it failed."""

    def __init__(self, moves: Sequence[Move], limit_bytes: int = READ_BYTES) -> None:
        """Moves of one old rank, in order of start; what is read at once, but one chunk at least."""
        self._moves = moves
        self._limit_bytes = limit_bytes
        self._left: Iterator[Read] = iter(())
        self._chunk_bytes: int | None = None
        self.read_bytes = 0
        """Of payloads, by all sources so far: whole chunks, each of which was verified."""

    def take(self, source: Source, target: Target) -> None:
        """All of it is in the target when this returns. Raises what source and target raise; what
        was written until then is of verified chunks."""
        header = source.trailer.record.header
        if header.chunk_bytes != self._chunk_bytes:
            # The first source, or one before it lied: what is left lies on the chunks of its table.
            self._chunk_bytes = header.chunk_bytes
            self._left = reads_of(
                self._moves, header.payload_bytes, header.chunk_bytes, self._limit_bytes
            )
        asked: deque[Read] = deque()

        def wanted() -> Iterator[range]:
            for read in self._left:
                asked.append(read)
                yield _chunks_of(read.span, header.chunk_bytes)

        try:
            with closing(source.read(wanted())) as views:
                for view in views:
                    read = asked[0]
                    if len(view) != read.span.length_bytes:
                        raise CorruptionError(
                            f"{source.trailer.record.ref}: {len(view)} bytes came for {read.span}"
                        )
                    self.read_bytes += len(view)
                    for piece in read.pieces:
                        data = view[piece.start : piece.start + piece.length_bytes]
                        target.write_payload(piece.target, data)
                    asked.popleft()
        finally:
            self._left = itertools.chain(asked, self._left)
        if (missed := next(self._left, None)) is not None:
            # A payload with a hole must not look whole, whatever a source does.
            self._left = itertools.chain((missed,), self._left)
            raise CorruptionError(f"{source.trailer.record.ref}: no bytes came for {missed.span}")


def check_source(record: ShardRecord, shard: ManifestShard, part: RankPart) -> None:
    """The open shard is the one that manifest and layout speak of: a range is read without reading
    the whole, so its chunk table is what has to be right. Raises CorruptionError."""
    header = record.header
    found = (header.rank, header.payload_bytes, header.layout, record.blake3, record.chunk_table)
    expected = (shard.rank, shard.payload_bytes, part.layout, shard.blake3, shard.chunk_table)
    if found != expected or part.payload_bytes != shard.payload_bytes:
        raise CorruptionError(
            f"shard of {record.ref}: its head and trailer say (rank, bytes, layout, blake3, chunk "
            f"table) = {found}, manifest and layout say {expected}"
        )


def _chunks_of(span: ByteRange, chunk_bytes: int) -> range:
    """`span` begins on a chunk and ends on one or at the payload's end."""
    return range(span.start // chunk_bytes, -(-span.stop // chunk_bytes))
