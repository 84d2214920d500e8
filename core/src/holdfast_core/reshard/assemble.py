"""Executes a plan for one source: verified chunks in, pieces out. Blocks; no retries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast_core.errors import CorruptionError
from holdfast_core.format.layout import RankPart
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.format.record import ShardRecord
from holdfast_core.reshard.plan import Move
from holdfast_core.reshard.reads import READ_BYTES, reads_of


class Source(Protocol):
    """What is needed of a tiers.base.ShardReader."""

    @property
    def record(self) -> ShardRecord: ...

    def read_payload_into(self, offset: int, buffer: memoryview) -> None: ...


class Target(Protocol):
    """The new payload."""

    def write_payload(self, offset: int, data: memoryview) -> None: ...


def copy_moves(moves: Sequence[Move], source: Source, target: Target) -> int:
    """Moves of this source, in order of start. Returns the bytes read. Raises CorruptionError: what
    was written from this source so far is of verified chunks, but the payload is not whole."""
    header = source.record.header
    size = max(READ_BYTES, header.chunk_bytes)
    buffer = memoryview(bytearray(min(size, max(header.payload_bytes, 1))))
    total = 0
    for read in reads_of(moves, header.payload_bytes, header.chunk_bytes):
        view = buffer[: read.span.length_bytes]
        source.read_payload_into(read.span.start, view)
        for piece in read.pieces:
            target.write_payload(piece.target, view[piece.start : piece.start + piece.length_bytes])
        total += len(view)
    return total


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
