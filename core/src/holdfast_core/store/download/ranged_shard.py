"""Reads of chunk ranges of one shard in the store.

The end of the shard is read first, by a ranged GET; then runs of whole chunks are fetched, several at a
time. A run takes one GET for each object that stores a part of it: one for a whole shard, several for a
pack. Each chunk is compared with the chunk table; a wrong chunk is read again, alone. At most
MAX_AHEAD_BYTES are in memory, or one run if it is longer.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.ids import ShardRef
from holdfast_core.shards.chunks import bad_chunks, payload_span
from holdfast_core.shards.coding import Coding
from holdfast_core.shards.file import Trailer
from holdfast_core.store.download.decode import fill_decoded
from holdfast_core.store.download.ranges import Extent
from holdfast_core.store.download.shard import MAX_AHEAD_BYTES
from holdfast_core.store.download.source import Source
from holdfast_core.store.download.stored import KeyOf, ShardPlaces, StoredShards, places_in
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.retry import Retrier
from holdfast_core.tiers.pooled import CLOSING, submit, wait_all

_LOG = logging.getLogger(__name__)


def open_ranged_shard(
    client: S3Client, retrier: Retrier, workers: ThreadPoolExecutor, key_of: KeyOf, ref: ShardRef
) -> RangedShard:
    """Read and verify the end of a shard, and return a source of its ranges.

    Raises:
        NotFoundError: The store has neither the shard nor its pack.
        CorruptionError: The end of the object does not verify.
        UnavailableError: The retry policy is spent.
    """
    shards = StoredShards(client, retrier, key_of)
    stored = shards.find(ref)
    places = places_in(shards, stored)
    return RangedShard(Source(client, retrier, stored.key), workers, stored.trailer, places)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that is being fetched."""

    view: memoryview
    """Buffer of the run's payload bytes."""
    parts: tuple[Future[None], ...]
    """Fetches of the run, one for each object that stores a part of it."""
    held_bytes: int
    """Memory of the buffer and of the compressed bytes that are decoded into it."""


class RangedShard:
    """Implementation of tiers.base.ShardSource for a shard that the store holds whole or as a pack."""

    def __init__(
        self,
        source: Source,
        workers: ThreadPoolExecutor,
        trailer: Trailer,
        places: ShardPlaces,
    ) -> None:
        self._source = source
        self._workers = workers
        self._trailer = trailer
        self._places = places

    @property
    def trailer(self) -> Trailer:
        return self._trailer

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See tiers.base.ShardSource."""
        runs = iter(wanted)
        chunks = next(runs, None)
        found: tuple[Extent, ...] | None = None
        waiting: deque[_Run] = deque()
        ahead_bytes = 0
        # On failure `stopped` keeps the other fetches from sending further requests.
        source = replace(self._source, stopped=threading.Event())
        try:
            while waiting or chunks is not None:
                while chunks is not None:
                    if found is None:
                        found = tuple(self._places.of(chunks))
                    length = payload_span(self._trailer.record.header, chunks).length_bytes
                    held = length + sum(map(_stored_bytes, found))
                    if waiting and ahead_bytes + held > MAX_AHEAD_BYTES:
                        break
                    waiting.append(self._submit(source, chunks, length, found, held))
                    ahead_bytes += held
                    chunks, found = next(runs, None), None
                for part in waiting[0].parts:
                    part.result()
                run = waiting.popleft()
                yield run.view
                ahead_bytes -= run.held_bytes
        except CancelledError as error:
            raise UnavailableError(f"{source.describe()}: {CLOSING}") from error
        finally:
            source.stopped.set()
            left = [part for run in waiting for part in run.parts]
            for part in left:
                part.cancel()
            wait_all(left)

    def _submit(
        self, source: Source, chunks: range, length: int, found: tuple[Extent, ...], held: int
    ) -> _Run:
        # An anonymous map, because a bytearray would be filled with zeros first.
        view = memoryview(mmap.mmap(-1, length))
        size = self._trailer.record.header.chunk_bytes
        parts = []
        for extent in found:
            first = (extent.chunks.start - chunks.start) * size
            place = view[first : first + len(extent.chunks) * size]
            at = replace(source, key=extent.key)
            parts.append(submit(self._workers, self._fetch, at, extent, place))
        return _Run(view, tuple(parts), held)

    def _fetch(self, source: Source, extent: Extent, view: memoryview) -> None:
        """Fetch the chunks of one extent into `view` and verify them.

        Raises NotFoundError if the shard's own object is gone, and CorruptionError if a chunk is wrong at
        every read or if another object that stores chunks of the shard is gone.
        """
        try:
            if extent.coding is None:
                bad = self._fetch_plain(source, extent, view)
            else:
                bad = self._fetch_coded(source, extent, extent.coding, view)
        except NotFoundError as error:
            if source.key == self._source.key:
                raise
            raise CorruptionError(
                f"{self._source.describe()}: stores chunks elsewhere: {error}"
            ) from error
        if bad:
            raise CorruptionError(
                f"{source.describe()}: chunks {bad[:8]} are not what its chunk table says, at two "
                "reads"
            )

    def _fetch_plain(self, source: Source, extent: Extent, view: memoryview) -> list[int]:
        """Fetch uncompressed chunks and return those that are wrong at every read."""
        source.fill(extent.offset, view)
        bad = bad_chunks(self._trailer, extent.chunks, view)
        if bad:
            _LOG.warning("%s: reading chunks %s once more", source.describe(), bad[:8])
        return [chunk for chunk in bad if not self._again(source, chunk, extent, view)]

    def _fetch_coded(
        self, source: Source, extent: Extent, coding: Coding, view: memoryview
    ) -> list[int]:
        """Fetch and decode compressed chunks and return those that are wrong at every read."""
        size = self._trailer.record.header.chunk_bytes
        places = [view[at * size : (at + 1) * size] for at in range(len(extent.chunks))]

        def is_good(position: int, place: memoryview) -> bool:
            chunk = extent.chunks[position]
            return not bad_chunks(self._trailer, range(chunk, chunk + 1), place)

        bad = fill_decoded(source, extent.offset, coding, places, is_good)
        return [extent.chunks[position] for position in bad]

    def _again(self, source: Source, chunk: int, extent: Extent, view: memoryview) -> bool:
        """Read one chunk again and return whether it is good now. A bit may have flipped in transit."""
        size = self._trailer.record.header.chunk_bytes
        start = (chunk - extent.chunks.start) * size
        place = view[start : start + size]
        source.fill(extent.offset + start, place)
        return not bad_chunks(self._trailer, range(chunk, chunk + 1), place)

    def close(self) -> None:
        """Do nothing: the connections belong to the tier."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _stored_bytes(extent: Extent) -> int:
    """Return the memory for the compressed bytes of an extent; 0 if it is not compressed."""
    return 0 if extent.coding is None else extent.coding.stored_bytes(0, len(extent.chunks))
