"""Fill a copy with chunks that other shards on the receiver's own disk contain.

The copy is still a whole file that depends on no other, so pruning, scrubbing and serving treat it like any
other. Chunks that need not be sent save network traffic and the sender's work for TLS.

Only chunks with the same number are compared. Ranks with the same tensors have them at the same offsets,
and so does one rank at different steps. An index of all digests would find more equal chunks, but would
need memory for each stored shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast_core.closing import Closing
from holdfast_core.errors import CorruptionError, HoldfastError
from holdfast_core.ids import ShardRef
from holdfast_core.peer.protocol import PIECE_BYTES
from holdfast_core.shards.chunks import payload_span
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.record import DIGEST_BYTES, ChunkTable, ShardRecord
from holdfast_core.store.download.copy import EqualRun
from holdfast_core.tiers.base import CopyWriter, NodeTier, ShardReader

MAX_RUNS = 2047
"""Largest number of runs that one copy takes from this node, because each may cost a request."""
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


class LocalChunks(Closing):
    """Open shards of this node that may contain chunks of a shard. The owner must close it."""

    def __init__(self, tier: NodeTier, trailer: Trailer) -> None:
        """Open the shards. `trailer` is that of the shard to copy."""
        self._tier = tier
        self._trailer = trailer
        self._open = contextlib.ExitStack()
        self._readers: dict[ShardRef, ShardReader] = {}
        for source in likely_sources(tier.list_shards(), trailer.record.ref):
            # A missing or corrupt shard is not used as a source. Its own readers report the error.
            with contextlib.suppress(HoldfastError, OSError):
                self._readers[source] = self._open.enter_context(tier.open_shard(source))

    def runs(self, first_chunk: int) -> tuple[EqualRun, ...]:
        """See store.download.copy.LocalSource."""
        header = self._trailer.record.header
        if header.chunk_bytes > PIECE_BYTES:
            return ()
        sources = [
            (ref, reader.table)
            for ref, reader in self._readers.items()
            if reader.record.header.chunk_bytes == header.chunk_bytes
        ]
        # Each run leaves a run before it to request.
        found = equal_runs(self._trailer.table, sources, MAX_RUNS)
        return tuple(run for run in found if run.chunks.start >= first_chunk)

    def take(self, run: EqualRun, writer: CopyWriter, may_go_on: Callable[[], None]) -> bool:
        """See store.download.copy.LocalSource. A source that is damaged is quarantined."""
        header = self._trailer.record.header
        span = payload_span(header, run.chunks)
        step = PIECE_BYTES - PIECE_BYTES % header.chunk_bytes
        for position in range(span.start, span.stop, step):
            may_go_on()
            room = writer.room(min(step, span.stop - position))
            try:
                self._readers[run.source].read_payload_into(position, room)
            except CorruptionError as error:
                self._readers.pop(run.source)
                self._tier.quarantine(run.source, error)
                return False
            writer.advance(len(room))
        return True

    def close(self) -> None:
        self._open.close()
