"""Reads of a shard in the store: runs of chunks, or the whole shard file.

The end of the object is read first: it has its own checksum, and it has the checksums of all chunks. Then
runs of whole chunks are fetched, several at a time. A run takes one request for each object that stores a
part of it: one for a whole shard, several for a pack. The worker that fetches a compressed chunk also
decodes it. Each chunk is verified; a wrong chunk is read again, alone. At most MAX_AHEAD_BYTES are in
memory, or one run if it is longer. A shard at a peer is read by the same code (peer.store).

The shard file is written from the same runs (copy).
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from holdfast_core.closing import Closing
from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.format.digest import crc32c
from holdfast_core.ids import ShardRef
from holdfast_core.shards.chunks import FindBad, bad_chunks, payload_runs, payload_span
from holdfast_core.shards.coding import Coding
from holdfast_core.shards.file import Trailer, head_bytes, pack_head, trailer_offset
from holdfast_core.shards.record import ShardRecord
from holdfast_core.store.download.copy import copy_file
from holdfast_core.store.download.decode import fill_decoded
from holdfast_core.store.download.source import READS, Source
from holdfast_core.store.download.stored import Extent, ShardPlaces, StoredShards, places_in
from holdfast_core.tiers.base import OpenWriter
from holdfast_core.tiers.objects import RangedStore
from holdfast_core.tiers.pooled import CLOSING, submit, wait_all

_LOG = logging.getLogger(__name__)
RUN_BYTES = 8 << 20
"""Payload bytes of a run of `copy_to`, unless a single chunk is longer; half of it if chunks are
compressed."""
MAX_AHEAD_BYTES = 48 << 20
"""Memory limit of the buffers of one reader, including compressed bytes. A sidecar, whose memory limit is
1 GiB, runs a few downloads at a time."""


def bad_crcs(trailer: Trailer, chunks: range, data: memoryview) -> list[int]:
    """Return those of `chunks`, whose bytes are in `data`, that do not match their CRC32C in the table."""
    size = trailer.record.header.chunk_bytes
    return [
        chunk
        for place, chunk in enumerate(chunks)
        if crc32c(data[place * size : (place + 1) * size]) != trailer.table.crcs[chunk]
    ]


def none_bad(trailer: Trailer, chunks: range, data: memoryview) -> tuple[int, ...]:
    """Compare nothing: the writer of a copy does."""
    return ()


def open_stored_shard(
    store: RangedStore,
    shards: StoredShards,
    workers: ThreadPoolExecutor,
    ref: ShardRef,
    *,
    ahead_bytes: int = MAX_AHEAD_BYTES,
    find_bad_piece: FindBad = bad_crcs,
    close: Callable[[], None] = lambda: None,
) -> StoredShardReader:
    """Read and verify the end of a shard, and return a source of its ranges.

    Args:
        store: The objects: those of a bucket, a folder or a peer.
        shards: Finds the shard there.
        workers: Threads that fetch ranges.
        ref: The shard.
        ahead_bytes: Memory limit of the runs that are fetched ahead.
        find_bad_piece: Finds the chunks of `pieces` that are wrong, to read them again.
        close: Called when the source is closed.

    Raises:
        NotFoundError: The store has neither the shard nor its pack.
        CorruptionError: The end of the object does not verify.
        UnavailableError: The store cannot be reached.
    """
    stored = shards.find(ref)
    places = places_in(shards, stored)
    source = Source(store, stored.key)
    return StoredShardReader(
        source, workers, stored.trailer, places, ahead_bytes, find_bad_piece, close
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that is being fetched."""

    buffer: memoryview
    """Memory of the run. It may be longer than the run."""
    length_bytes: int
    parts: tuple[Future[None], ...]
    """Fetches of the run, one for each object that stores a part of it."""
    held_bytes: int
    """Memory of the run and of the compressed bytes that are decoded into it."""


class StoredShardReader(Closing):
    """Implementation of tiers.base.ShardSource for a shard that the store holds whole or as a pack."""

    def __init__(
        self,
        source: Source,
        workers: ThreadPoolExecutor,
        trailer: Trailer,
        places: ShardPlaces,
        ahead_bytes: int,
        find_bad_piece: FindBad,
        close: Callable[[], None],
    ) -> None:
        """`source` is the object of the shard itself, and `places` are those of its chunks."""
        self._ahead_bytes = ahead_bytes
        self._find_bad_piece = find_bad_piece
        self._close = close
        self._source = source
        self._workers = workers
        self._trailer = trailer
        self._places = places

    @property
    def trailer(self) -> Trailer:
        return self._trailer

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See tiers.base.ShardSource."""
        return self._read(wanted, bad_chunks)

    def pieces(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See store.download.copy.PieceSource.

        A chunk that `find_bad_piece` finds is read again.
        """
        return self._read(wanted, self._find_bad_piece)

    def copy_to(self, open_writer: OpenWriter) -> ShardRecord:
        """Write the whole shard file and commit the writer. Return the record of the shard.

        Raises:
            NotFoundError: The shard is gone.
            CorruptionError: Bytes were wrong at every read, or a shard to which a pack refers is gone.
            UnavailableError: The store cannot be reached, or the tier is being closed.
            HoldfastError: Whatever else the writer raises. It is aborted after any error.
        """
        self._places.look(self._workers)
        run_bytes = RUN_BYTES // 2 if self._places.has_coding else RUN_BYTES
        return copy_file(self, open_writer, run_bytes).record

    def _read(self, wanted: Iterable[range], find_bad: FindBad) -> Generator[memoryview]:
        runs = iter(wanted)
        chunks = next(runs, None)
        found: tuple[Extent, ...] | None = None
        waiting: deque[_Run] = deque()
        free: list[memoryview] = []
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
                    if waiting and ahead_bytes + held > self._ahead_bytes:
                        break
                    buffer = _buffer(free, length)
                    parts = self._submit(source, chunks, buffer, found, find_bad)
                    waiting.append(_Run(buffer, length, parts, held))
                    ahead_bytes += held
                    chunks, found = next(runs, None), None
                for part in waiting[0].parts:
                    part.result()
                run = waiting.popleft()
                yield run.buffer[: run.length_bytes]
                free[:] = [run.buffer]
                ahead_bytes -= run.held_bytes
        except CancelledError as error:
            raise UnavailableError(f"{source.describe()}: {CLOSING}") from error
        finally:
            # No worker may write into a buffer after this function has returned.
            source.stopped.set()
            left = [part for run in waiting for part in run.parts]
            for part in left:
                part.cancel()
            wait_all(left)

    def _submit(
        self,
        source: Source,
        chunks: range,
        buffer: memoryview,
        found: tuple[Extent, ...],
        find_bad: FindBad,
    ) -> tuple[Future[None], ...]:
        header = self._trailer.record.header
        parts = []
        for extent in found:
            first = (extent.chunks.start - chunks.start) * header.chunk_bytes
            place = buffer[first : first + payload_span(header, extent.chunks).length_bytes]
            at = replace(source, key=extent.key)
            parts.append(submit(self._workers, self._fetch, at, extent, place, find_bad))
        return tuple(parts)

    def _fetch(self, source: Source, extent: Extent, view: memoryview, find_bad: FindBad) -> None:
        """Fetch the chunks of one extent into `view` and verify them.

        Raises NotFoundError if the shard's own object is gone, and CorruptionError if a chunk is wrong at
        every read or if another object that stores chunks of the shard is gone.
        """
        try:
            if extent.coding is None:
                bad = self._fetch_plain(source, extent, view, find_bad)
            else:
                bad = self._fetch_coded(source, extent, extent.coding, view, find_bad)
        except NotFoundError as error:
            if source.key == self._source.key:
                raise
            raise CorruptionError(
                f"{self._source.describe()}: its chunks are stored in other objects: {error}"
            ) from error
        if bad:
            raise CorruptionError(
                f"{source.describe()}: chunks {bad[:8]} do not match its chunk table at {READS} "
                "reads"
            )

    def _fetch_plain(
        self, source: Source, extent: Extent, view: memoryview, find_bad: FindBad
    ) -> list[int]:
        """Fetch uncompressed chunks and return those that are wrong at every read."""
        source.fill(extent.offset, view)
        size = self._trailer.record.header.chunk_bytes
        bad = list(find_bad(self._trailer, extent.chunks, view))
        for _ in range(READS - 1):
            again, bad = bad, []
            for chunk in again:
                # A bit may have flipped in transit.
                _LOG.warning("%s: reading chunk %s again", source.describe(), chunk)
                start = (chunk - extent.chunks.start) * size
                place = view[start : start + size]
                source.fill(extent.offset + start, place)
                bad += find_bad(self._trailer, range(chunk, chunk + 1), place)
        return bad

    def _fetch_coded(
        self, source: Source, extent: Extent, coding: Coding, view: memoryview, find_bad: FindBad
    ) -> list[int]:
        """Fetch and decode compressed chunks and return those that are wrong at every read."""
        size = self._trailer.record.header.chunk_bytes
        places = [view[at * size : (at + 1) * size] for at in range(len(extent.chunks))]

        def is_good(position: int, place: memoryview) -> bool:
            chunk = extent.chunks[position]
            return not list(find_bad(self._trailer, range(chunk, chunk + 1), place))

        bad = fill_decoded(source, extent.offset, coding, places, is_good)
        return [extent.chunks[position] for position in bad]

    def close(self) -> None:
        self._close()


def _buffer(free: list[memoryview], length: int) -> memoryview:
    """Return a free buffer, or a new one if none is long enough.

    A new one is an anonymous map, because a bytearray would be filled with zeros first.
    """
    if free and len(free[-1]) >= length:
        return free.pop()
    free.clear()
    return memoryview(mmap.mmap(-1, length))


def _stored_bytes(extent: Extent) -> int:
    """Return the memory for the compressed bytes of an extent; 0 if it is not compressed."""
    return 0 if extent.coding is None else extent.coding.stored_bytes(0, len(extent.chunks))


def is_damaged(store: RangedStore, key: str, workers: ThreadPoolExecutor, ref: ShardRef) -> bool:
    """Read the object of a whole shard, and return whether any byte of it is damaged."""
    whole = StoredShards(store, lambda ref, packed: key)
    try:
        shard = open_stored_shard(store, whole, workers, ref)
        header = shard.trailer.record.header
        for _ in shard.read(payload_runs(header, RUN_BYTES)):
            pass
        stop = head_bytes(header) + header.payload_bytes
        head, padding = bytearray(head_bytes(header)), bytearray(trailer_offset(header) - stop)
        store.read_into(key, 0, memoryview(head))
        store.read_into(key, stop, memoryview(padding))
    except CorruptionError:
        return True
    return head != pack_head(header) or any(padding)
