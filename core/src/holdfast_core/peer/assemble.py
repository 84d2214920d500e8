"""Fill a copy with chunks that other shards on the receiver's own disk contain.

The copy is still a whole file that depends on no other, so pruning, scrubbing and serving treat it like any
other. This saves network traffic and the sender's work for TLS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from holdfast_core.errors import CorruptionError, FormatError, HoldfastError, UnavailableError
from holdfast_core.ids import ShardRef
from holdfast_core.peer.data import chunk_span
from holdfast_core.peer.equal_chunks import Run, equal_runs, likely_sources
from holdfast_core.peer.protocol import MAX_DATA_BYTES, MAX_RUNS
from holdfast_core.shards.file import Trailer, head_bytes
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import CopyWriter, NodeTier, ShardReader


class LocalChunks:
    """Open shards of this node that may contain chunks of an incoming copy. The owner must close it.

    Its truth value is whether there are such shards.
    """

    def __init__(self, tier: NodeTier, ref: ShardRef) -> None:
        self._tier = tier
        self._ref = ref
        self._open = contextlib.ExitStack()
        self._readers: dict[ShardRef, ShardReader] = {}
        for source in likely_sources(tier.list_shards(), ref):
            # A missing or corrupt shard is not used as a source. Its own readers report the error.
            with contextlib.suppress(HoldfastError, OSError):
                self._readers[source] = self._open.enter_context(tier.open_shard(source))

    def __bool__(self) -> bool:
        return bool(self._readers)

    def runs(self, trailer: Trailer, offset: int) -> tuple[Run, ...]:
        """Return the runs of chunks that this node has, of the part of the file from `offset` on.

        Args:
            trailer: Trailer of the incoming shard.
            offset: Byte of the file that the copy has reached.
        """
        header = trailer.record.header
        if not trailer.table.digests or header.chunk_bytes > MAX_DATA_BYTES:
            return ()
        sources = [
            (ref, reader.table)
            for ref, reader in self._readers.items()
            if reader.record.header.chunk_bytes == header.chunk_bytes
        ]
        first = -(-max(0, offset - head_bytes(header)) // header.chunk_bytes)
        found = equal_runs(trailer.table, sources, MAX_RUNS)
        return tuple(run for run in found if run.chunks.start >= first)

    def take(self, record: ShardRecord, run: Run, writer: CopyWriter) -> None:
        """Append the chunks of `run` to the copy.

        Raises:
            UnavailableError: The source is corrupt. It is quarantined, so that the next attempt asks the
                sender for these chunks.
            FormatError: The copy has not reached the start of `run`, or is past it.
        """
        span = chunk_span(record, run.chunks)
        if writer.offset != span.start:
            raise FormatError(
                f"copy of {self._ref}: at byte {writer.offset}, expected {span.start}: the sender "
                "sent chunks that it was requested to leave out"
            )
        reader = self._readers[run.source]
        start = span.start - head_bytes(record.header)
        stop = span.stop - head_bytes(record.header)
        step = MAX_DATA_BYTES - MAX_DATA_BYTES % record.header.chunk_bytes
        for position in range(start, stop, step):
            length = min(step, stop - position)
            room = writer.room(length)
            try:
                reader.read_payload_into(position, room)
            except CorruptionError as error:
                self._tier.quarantine(run.source, str(error))
                raise UnavailableError(f"copy of {self._ref}: {error}") from error
            writer.advance(length)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def chunks_of(runs: Sequence[Run]) -> tuple[range, ...]:
    """Return the chunks of `runs` as a REPLY names them. Adjacent runs of different sources are joined."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.chunks.start:
            joined[-1] = range(joined[-1].start, run.chunks.stop)
        else:
            joined.append(run.chunks)
    return tuple(joined)
