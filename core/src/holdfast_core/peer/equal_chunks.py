"""Find the chunks of a shard that other shards contain, so that they need not be sent. No I/O.

Only chunks with the same number are compared. Ranks with the same tensors have them at the same offsets, and
so does one rank at different steps. An index of all digests would find more equal chunks, but would need
memory for each stored shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from holdfast_core.ids import ShardRef
from holdfast_core.shards.chunk_table import DIGEST_BYTES, ChunkTable
from holdfast_core.shards.record import ShardRecord
from holdfast_core.store.download.copy import EqualRun

MAX_SOURCES = 16
"""Largest number of shards that one shard is compared with."""


def likely_sources(records: Iterable[ShardRecord], ref: ShardRef) -> tuple[ShardRef, ...]:
    """Return the shards that are likely to contain chunks of `ref`, at most MAX_SOURCES.

    These are the shards of the same checkpoint, then the newest one of the same rank from another checkpoint.
    """
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
) -> tuple[EqualRun, ...]:
    """Return the runs of chunks of `table` that the sources contain, in order and without overlap.

    Args:
        sources: Shards and their tables. If several have a chunk, the first one is used.
        limit: Largest number of runs. If there are more, the longest are returned.
    """
    missing = [range(len(table))]
    runs: list[EqualRun] = []
    for ref, other in sources:
        left: list[range] = []
        for span in missing:
            position = span.start
            for run in _joined(_equal(table.digests, other.digests, span)):
                runs.append(EqualRun(run, ref))
                left.append(range(position, run.start))
                position = run.stop
            left.append(range(position, span.stop))
        missing = [span for span in left if span]
    longest = sorted(runs, key=lambda run: len(run.chunks), reverse=True)[:limit]
    return tuple(sorted(longest, key=lambda run: run.chunks.start))


def _equal(ours: bytes, theirs: bytes, span: range) -> Iterator[range]:
    """Yield the parts of `span` in which the tables are equal. Adjacent parts are not joined.

    Parts that differ are halved and compared again, which is fast where long parts are equal.
    """
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
    """Join adjacent spans."""
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
