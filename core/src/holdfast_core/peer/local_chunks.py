"""Fill a copy with chunks that other shards on the receiver's own disk contain.

The copy is still a whole file that depends on no other, so pruning, scrubbing and serving treat it like any
other. This saves network traffic and the sender's work for TLS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from holdfast_core.closing import Closing
from holdfast_core.errors import CorruptionError, HoldfastError
from holdfast_core.ids import ShardRef
from holdfast_core.messages.gang import MAX_SPANS
from holdfast_core.peer.equal_chunks import equal_runs, likely_sources
from holdfast_core.peer.protocol import PIECE_BYTES
from holdfast_core.shards.chunks import payload_span
from holdfast_core.shards.file import Trailer
from holdfast_core.store.download.copy import EqualRun
from holdfast_core.tiers.base import CopyWriter, NodeTier, ShardReader


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
        # Each run leaves a run before it to request, and a request has at most MAX_SPANS.
        found = equal_runs(self._trailer.table, sources, MAX_SPANS - 1)
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
