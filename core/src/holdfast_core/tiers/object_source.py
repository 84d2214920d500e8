"""Ranges of one shard in the store: its trailer by a ranged GET, then whole chunks, some runs at once.

Each run is one GET; what it brings is compared with the chunk table, and chunks that are wrong are
asked for once more, alone. At most MAX_AHEAD_BYTES are in memory.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Self

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.format.chunk_table import table_bytes
from holdfast_core.format.chunks import bad_chunks, file_span
from holdfast_core.format.record import CHUNK_BYTES
from holdfast_core.format.shard import BLOCK_BYTES, FORMAT_VERSION, Trailer
from holdfast_core.ids import ShardRef
from holdfast_core.tiers.object_download import MAX_AHEAD_BYTES, Source, read_trailer
from holdfast_core.tiers.retry import Retrier
from holdfast_core.tiers.s3_client import S3Client, S3Request

_LOG = logging.getLogger(__name__)


def open_stored_shard(
    client: S3Client, retrier: Retrier, workers: ThreadPoolExecutor, key: str, ref: ShardRef
) -> StoredShard:
    """Raises NotFoundError, CorruptionError, UnavailableError."""
    found = retrier.look(f"look for {key}", lambda: client.head(key))
    if found is None:
        raise NotFoundError(f"{client.describe(S3Request('HEAD', key))}: no such shard")
    source = Source(client, retrier, key, threading.Event())
    trailer, _ = read_trailer(source, ref, found.size_bytes, _likely_trailer(found.size_bytes))
    return StoredShard(source, workers, trailer)


class StoredShard:
    """base.ShardSource of one object."""

    def __init__(self, source: Source, workers: ThreadPoolExecutor, trailer: Trailer) -> None:
        self._source = source
        self._workers = workers
        self._trailer = trailer

    @property
    def trailer(self) -> Trailer:
        return self._trailer

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See base.ShardSource."""
        source = replace(self._source, stopped=threading.Event())
        runs = iter(wanted)
        chunks = next(runs, None)
        waiting: deque[tuple[Future[None], memoryview]] = deque()
        ahead_bytes = 0
        try:
            while waiting or chunks is not None:
                while chunks is not None:
                    length = file_span(self._trailer.record.header, chunks).length_bytes
                    if waiting and ahead_bytes + length > MAX_AHEAD_BYTES:
                        break
                    # An anonymous map: a bytearray would be filled with zeros first.
                    view = memoryview(mmap.mmap(-1, length))
                    future = self._workers.submit(self._fetch, source, chunks, view)
                    waiting.append((future, view))
                    ahead_bytes += length
                    chunks = next(runs, None)
                future, view = waiting[0]
                future.result()
                waiting.popleft()
                yield view
                ahead_bytes -= len(view)
        except CancelledError as error:
            raise UnavailableError(f"{source.describe()}: the tier is being closed") from error
        finally:
            # Whoever fails first leaves nobody behind who still asks for more.
            source.stopped.set()
            for future, _ in waiting:
                future.cancel()
            wait([future for future, _ in waiting])

    def _fetch(self, source: Source, chunks: range, view: memoryview) -> None:
        header = self._trailer.record.header
        source.fill(file_span(header, chunks).start, view)
        bad = bad_chunks(self._trailer, chunks, view)
        if bad:
            _LOG.warning("%s: reading chunks %s once more", source.describe(), bad[:8])
            bad = [chunk for chunk in bad if not self._again(source, chunk, chunks, view)]
        if bad:
            raise CorruptionError(
                f"{source.describe()}: chunks {bad[:8]} are not what its chunk table says, at two "
                "reads"
            )

    def _again(self, source: Source, chunk: int, chunks: range, view: memoryview) -> bool:
        """A bit may have flipped on the way: whether the chunk is good when read alone."""
        alone = range(chunk, chunk + 1)
        span = file_span(self._trailer.record.header, alone)
        start = (chunk - chunks.start) * self._trailer.record.header.chunk_bytes
        place = view[start : start + span.length_bytes]
        source.fill(span.start, place)
        return not bad_chunks(self._trailer, alone, place)

    def close(self) -> None:
        """Connections belong to the tier."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _likely_trailer(size_bytes: int) -> int:
    """Enough of a file's end for the trailer of a shard as they are written, and little more: many
    ranks read it. Where that is too little, the footer says how much it is."""
    table = table_bytes(size_bytes // CHUNK_BYTES + 1, FORMAT_VERSION)
    return min(size_bytes, table + 2 * BLOCK_BYTES)
