"""Which chunks of a shard are in other shards already, so that they need not be sent. Pure.

Chunks are compared where they lie, first with first: ranks that hold the same tensors have them at
the same offsets, and so has a rank at its next step. An index of all digests would find more, and
would cost memory with every shard that is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast_core.ids import ShardRef
from holdfast_core.shards.chunk_table import DIGEST_BYTES, ChunkTable
from holdfast_core.shards.record import ShardRecord

MAX_SOURCES = 16
"""Shards that one is compared with: the ranks of a pod, and what it keeps for others."""


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks in a row that are equal to the chunks of the same numbers in another shard."""

    chunks: range
    source: ShardRef


def likely_sources(records: Iterable[ShardRecord], ref: ShardRef) -> tuple[ShardRef, ...]:
    """Shards at hand that may have chunks of `ref`: those of the same checkpoint, then the newest
    one that is older of the same rank. At most MAX_SOURCES."""
    same: list[ShardRecord] = []
    older: list[ShardRecord] = []
    for record in records:
        if record.ref.job_uid != ref.job_uid:
            continue
        if (record.ref.step, record.ref.round) == (ref.step, ref.round):
            same.append(record)
        elif record.ref.rank == ref.rank:
            older.append(record)
    same.sort(key=lambda record: record.ref.rank)
    older.sort(key=lambda record: (record.ref.step, record.ref.round))
    return tuple(record.ref for record in (*same[: MAX_SOURCES - 1], *older[-1:]))


def equal_runs(
    table: ChunkTable, sources: Sequence[tuple[ShardRef, ChunkTable]], limit: int
) -> tuple[Run, ...]:
    """Runs in order, none twice; of more than `limit` the longest. An earlier source wins."""
    missing = [range(len(table))]
    runs: list[Run] = []
    for ref, other in sources:
        left: list[range] = []
        for span in missing:
            position = span.start
            for run in _joined(_equal(table.digests, other.digests, span)):
                runs.append(Run(run, ref))
                left.append(range(position, run.start))
                position = run.stop
            left.append(range(position, span.stop))
        missing = [span for span in left if span]
    longest = sorted(runs, key=lambda run: len(run.chunks), reverse=True)[:limit]
    return tuple(sorted(longest, key=lambda run: run.chunks.start))


def _equal(ours: bytes, theirs: bytes, span: range) -> Iterator[range]:
    """Equal stretches of the two tables. Halves what differs: quick for long equal ones."""
    if not span:
        return
    start, stop = span.start * DIGEST_BYTES, span.stop * DIGEST_BYTES
    if ours[start:stop] == theirs[start:stop]:
        yield span
    elif len(span) > 1:
        middle = span.start + len(span) // 2
        yield from _equal(ours, theirs, range(span.start, middle))
        yield from _equal(ours, theirs, range(middle, span.stop))


def _joined(spans: Iterable[range]) -> Iterator[range]:
    current = range(0)
    for span in spans:
        if current and span.start == current.stop:
            current = range(current.start, span.stop)
            continue
        if current:
            yield current
        current = span
    if current:
        yield current
