"""Conversion of moves to reads of whole chunks, because only whole chunks can be verified. Pure.

A chunk that several moves need is read once. Chunks that no move needs are not read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast_core.ids import ByteRange, Rank
from holdfast_core.reshard.plan import Move

READ_BYTES = 8 << 20
"""Maximum length of one read, in whole chunks. It bounds the reader's buffer and one request to a peer or
a store."""


class Piece(NamedTuple):
    """Bytes of a read or an old payload, and their offset in the new payload.

    `start` counts from the first byte of the read or of the old payload.
    """

    start: int
    length_bytes: int
    target: int


@dataclass(frozen=True, slots=True)
class Read:
    """One read of whole chunks: `span` of the source's payload, and the pieces of it that are needed."""

    span: ByteRange
    pieces: tuple[Piece, ...]


def by_source(moves: Iterable[Move]) -> dict[Rank, list[Move]]:
    """Return the moves of each old rank, in order of start."""
    found: dict[Rank, list[Move]] = {}
    for move in sorted(moves):
        found.setdefault(move.source, []).append(move)
    return found


def reads_of(
    moves: Sequence[Move], payload_bytes: int, chunk_bytes: int, limit_bytes: int = READ_BYTES
) -> Iterator[Read]:
    """Yield the reads for the moves of one source.

    Args:
        moves: Moves of one old rank, in order of start.
        payload_bytes: Length of the old rank's payload.
        chunk_bytes: Chunk size of the old rank's shard.
        limit_bytes: Maximum length of one read. A read is at least one chunk.
    """
    limit_bytes = max(limit_bytes // chunk_bytes, 1) * chunk_bytes
    start = stop = 0
    pieces: list[Piece] = []
    for run in _runs(moves):
        position, end = run.start, run.start + run.length_bytes
        while position < end:
            chunk = position - position % chunk_bytes
            if not pieces or chunk > stop or position >= start + limit_bytes:
                if pieces:
                    yield Read(ByteRange(start, min(stop, payload_bytes)), tuple(pieces))
                    pieces = []
                start = stop = chunk
            length = min(end, start + limit_bytes) - position
            pieces.append(Piece(position - start, length, run.target + position - run.start))
            position += length
            stop = max(stop, position + -position % chunk_bytes)
    if pieces:
        yield Read(ByteRange(start, min(stop, payload_bytes)), tuple(pieces))


def _runs(moves: Sequence[Move]) -> Iterator[Piece]:
    """Yield the single runs of moves in order of start.

    Only moves whose ranges overlap are merged, so that few iterators are open at a time.
    """
    first = 0
    while first < len(moves):
        last, stop = first + 1, moves[first].stop
        while last < len(moves) and moves[last].start < stop:
            stop = max(stop, moves[last].stop)
            last += 1
        if last == first + 1:
            yield from _runs_of(moves[first])
        else:
            yield from heapq.merge(*map(_runs_of, moves[first:last]))
        first = last


def _runs_of(move: Move) -> Iterator[Piece]:
    for i in range(move.times):
        start, target = move.start + i * move.start_step, move.target + i * move.target_step
        yield Piece(start, move.length_bytes, target)
