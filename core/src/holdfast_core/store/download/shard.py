"""Reads of a shard in the store: runs of chunks, or the whole shard file.

The end of the object is read first: it has its own checksum, and it has the checksums of all chunks. Then
runs of whole chunks are fetched, several at a time. A run takes one request for each object that stores a
part of it: one for a whole shard, several for a pack. The worker that fetches a compressed chunk also
decodes it. Each chunk is verified; a wrong chunk is read again, alone. At most MAX_AHEAD_BYTES are in
memory, or one run if it is longer. A shard at a peer is read by the same code (peer.store).

The shard file is written from the same runs. It is a whole file that depends on no other (ADR 0020), and
chunks that this node has already are not requested. It is written in order: the head, which the trailer
determines, then the payload from the source and from this node, then padding and trailer.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.format.canonical import crc32c
from holdfast_core.ids import ShardRef
from holdfast_core.shards.coding import ChunkDecoder
from holdfast_core.shards.file import (
    FindBad,
    ShardHeader,
    ShardRecord,
    Trailer,
    bad_chunks,
    head_bytes,
    pack_head,
    pack_trailer,
    payload_runs,
    payload_span,
    trailer_offset,
)
from holdfast_core.shards.pack import Coding
from holdfast_core.store.download.stored import (
    READS,
    Extent,
    ShardPlaces,
    Source,
    StoredShard,
    StoredShards,
    places_in,
)
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import CopyWriter, OpenWriter
from holdfast_core.tiers.objects import RangedStore
from holdfast_core.tiers.sources import CLOSING, submit, wait_all


@dataclass(frozen=True, slots=True)
class EqualRun:
    """Consecutive chunks that equal the chunks with the same numbers in the shard `source` on this node."""

    chunks: range
    source: ShardRef


class PieceSource(Protocol):
    """A shard that is copied."""

    @property
    def trailer(self) -> Trailer: ...

    def pieces(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """Yield the bytes of each run of chunks, in order, as tiers.base.ShardSource.read does.

        The writer verifies them. The source verifies only what it needs for its own decisions.
        """
        ...


class LocalSource(Protocol):
    """Shards of this node that may have chunks of the shard."""

    def runs(self, first_chunk: int) -> Sequence[EqualRun]:
        """Return the runs that this node has, from a chunk on, in order."""
        ...

    def take(self, run: EqualRun, writer: CopyWriter, may_go_on: Callable[[], None]) -> bool:
        """Append the chunks of a run to the copy. Return False, in the middle, if its source is damaged."""
        ...


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that is durable on this node."""

    record: ShardRecord
    received_bytes: int
    """Bytes that the source sent for it, the trailer included."""


def copy_file(
    source: PieceSource,
    open_writer: OpenWriter,
    run_bytes: int,
    local: LocalSource | None = None,
    may_go_on: Callable[[], None] = lambda: None,
) -> Copied:
    """Write the whole shard file and commit the writer. It is verified and durable when this returns.

    Args:
        source: The shard.
        open_writer: Opens the writer, which verifies chunks, identity and BLAKE3.
        run_bytes: Length of the runs that are requested, unless a single chunk is longer.
        local: Shards of this node.
        may_go_on: Called before each run and before the commit. An error that it raises ends the copy.

    Raises:
        HoldfastError: What the source and the writer raise. The writer is aborted after any error.
    """
    record, table = source.trailer.record, source.trailer.table
    header = record.header
    end = trailer_offset(header)
    padding = end - head_bytes(header) - header.payload_bytes
    writer = open_writer(record.ref, record.file_bytes)
    try:
        writer.write(pack_head(header))
        payload_bytes = _write_payload(source, writer, run_bytes, local, may_go_on)
        writer.write(bytes(padding) + pack_trailer(header, record.blake3, table))
        may_go_on()
    except BaseException:
        writer.abort()
        raise
    return Copied(writer.commit(), payload_bytes + record.file_bytes - end)


def _write_payload(
    source: PieceSource,
    writer: CopyWriter,
    run_bytes: int,
    local: LocalSource | None,
    may_go_on: Callable[[], None],
) -> int:
    """Write the payload. Return the number of bytes that the source sent."""
    header = source.trailer.record.header
    received_bytes = 0
    while (position := writer.offset - head_bytes(header)) < header.payload_bytes:
        # A local source that turns out to be damaged is no longer among the runs of the next round.
        parts = tuple(_parts(header, position, run_bytes, local))
        missing = (part for part in parts if isinstance(part, range))
        with closing(source.pieces(missing)) as views:
            for part in parts:
                may_go_on()
                if isinstance(part, range):
                    view = next(views)
                    writer.write(view)
                    received_bytes += len(view)
                elif local is None or not local.take(part, writer, may_go_on):
                    break
    return received_bytes


def _parts(
    header: ShardHeader, position: int, run_bytes: int, local: LocalSource | None
) -> Iterator[range | EqualRun]:
    """Return, in order, the runs that this node has, and the runs between them that it lacks."""
    first, total = (-(-at // header.chunk_bytes) for at in (position, header.payload_bytes))
    count = max(1, run_bytes // header.chunk_bytes)
    held = local.runs(first) if local else ()
    for run in (*held, None):
        stop = total if run is None else run.chunks.start
        for start in range(first, stop, count):
            yield range(start, min(start + count, stop))
        if run is not None:
            yield run
            first = run.chunks.stop


_LOG = logging.getLogger(__name__)


def fill_decoded(
    source: Source,
    offset: int,
    coding: Coding,
    places: Sequence[memoryview],
    is_good: Callable[[int, memoryview], bool],
) -> list[int]:
    """Fetch consecutive compressed chunks of an object and decode them.

    A chunk that does not decode or does not verify is read again, alone, up to READS reads in all. Besides
    `places` the stored bytes are in memory; they are never longer than the chunks.

    Args:
        source: The object.
        offset: Where the first chunk begins in the object.
        coding: How these chunks are stored.
        places: One buffer for each chunk, as long as the chunk.
        is_good: Receives the position of a chunk and its buffer; returns whether the chunk verifies.

    Returns:
        The positions in `places` of the chunks that were wrong at every read.

    Raises:
        NotFoundError: The object is gone.
        UnavailableError: The retry policy is spent.
    """
    decoder = ChunkDecoder()
    total = coding.stored_bytes(0, len(places))
    # An anonymous map, because a bytearray would be filled with zeros first.
    stored = memoryview(mmap.mmap(-1, total))
    source.fill(offset, stored)
    bad: list[int] = []
    for position, place in enumerate(places):
        start, stop = (coding.stored_bytes(0, at) for at in (position, position + 1))
        found = stored[start:stop]
        for left in reversed(range(READS)):
            why = _wrong(decoder, found, coding.widths[position], place, position, is_good)
            if not why:
                break
            if not left:
                bad.append(position)
                break
            _LOG.warning(
                "%s: bytes from %d on: %s; reading them again",
                source.describe(),
                offset + start,
                why,
            )
            source.fill(offset + start, found)
    return bad


def _wrong(
    decoder: ChunkDecoder,
    stored: memoryview,
    width: int,
    place: memoryview,
    position: int,
    is_good: Callable[[int, memoryview], bool],
) -> str:
    """Decode a chunk into its buffer and return why the result is wrong; "" if it is good."""
    try:
        decoder.decode(stored, width, place)
    except CorruptionError as error:
        return str(error)
    return "" if is_good(position, place) else "the chunk does not match the chunk table"


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
    return StoredShardReader(
        store, workers, stored, places_in(shards, stored), ahead_bytes, find_bad_piece, close
    )


class OtherObjects:
    """Objects that several shards of one checkpoint refer to, and what was verified of them.

    A drill reads each stored byte once. An object of the same checkpoint is read with the shard that it
    belongs to, so a reference to it is not followed. The chunks of an earlier checkpoint are read with the
    first shard that refers to them.
    """

    def __init__(self, own_prefix: str) -> None:
        """`own_prefix` is the beginning of the keys of the checkpoint's own objects."""
        self._own_prefix = own_prefix
        self._verified: dict[str, bytearray] = {}
        """One byte for each chunk of an object, by key."""

    def unverified(self, extent: Extent) -> Iterator[range]:
        """Yield the runs of an extent's chunks that must still be read."""
        if extent.key.startswith(self._own_prefix):
            return
        known = self._verified.get(extent.key, bytearray())
        for is_known, run in itertools.groupby(
            extent.chunks, lambda chunk: chunk < len(known) and bool(known[chunk])
        ):
            if not is_known:
                chunks = tuple(run)
                yield range(chunks[0], chunks[-1] + 1)

    def add(self, key: str, chunks: range) -> None:
        """Record that these chunks of an object were verified."""
        known = self._verified.setdefault(key, bytearray())
        known.extend(bytes(max(0, chunks.stop - len(known))))
        known[chunks.start : chunks.stop] = b"\1" * len(chunks)


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
        store: RangedStore,
        workers: ThreadPoolExecutor,
        stored: StoredShard,
        places: ShardPlaces,
        ahead_bytes: int,
        find_bad_piece: FindBad,
        close: Callable[[], None],
    ) -> None:
        """`stored` is the object of the shard itself, and `places` are those of its chunks."""
        self.stored = stored
        self._ahead_bytes = ahead_bytes
        self._find_bad_piece = find_bad_piece
        self._close = close
        self._source = Source(store, stored.key)
        self._workers = workers
        self._trailer = stored.trailer
        self._places = places

    @property
    def trailer(self) -> Trailer:
        return self._trailer

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See tiers.base.ShardSource."""
        return self._read(wanted, bad_chunks)

    def pieces(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See store.download.shard.PieceSource.

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
        return copy_file(self, open_writer, self._look()).record

    def verify(self, others: OtherObjects) -> int:
        """Read every byte of the shard's object and the chunks that only `others` has, and compare all.

        `others` gets what was read of other objects, after all of it was verified.

        Returns:
            Payload bytes that were read.

        Raises:
            CorruptionError: Bytes were wrong at every read, or a shard to which a pack refers is gone.
            NotFoundError: The shard is gone.
            UnavailableError: The store cannot be reached, or the tier is being closed.
        """
        run_bytes, read_bytes = self._look(), 0
        found: list[tuple[str, range]] = []
        with closing(self.read(self._to_verify(run_bytes, others, found))) as views:
            for view in views:
                read_bytes += len(view)
        if self.stored.index is None:
            self._verify_frame()
        for key, chunks in found:
            others.add(key, chunks)
        return read_bytes

    def _look(self) -> int:
        """Look up all places, and return the length of the runs that a read of all chunks requests."""
        self._places.look(self._workers)
        return RUN_BYTES // 2 if self._places.has_coding else RUN_BYTES

    def _to_verify(
        self, run_bytes: int, others: OtherObjects, found: list[tuple[str, range]]
    ) -> Iterator[range]:
        """Yield the runs that `verify` reads. Those of other objects are added to `found`."""
        for run in payload_runs(self._trailer.record.header, run_bytes):
            for extent in self._places.of(run):
                if extent.key == self._source.key:
                    yield extent.chunks
                    continue
                for chunks in others.unverified(extent):
                    found.append((extent.key, chunks))
                    yield chunks

    def _verify_frame(self) -> None:
        """Compare what a shard file has around its payload. Raises CorruptionError."""
        header = self._trailer.record.header
        stop = head_bytes(header) + header.payload_bytes
        head, padding = bytearray(head_bytes(header)), bytearray(trailer_offset(header) - stop)
        for _ in range(READS):
            self._source.fill(0, memoryview(head))
            self._source.fill(stop, memoryview(padding))
            if head == pack_head(header) and not any(padding):
                return
        raise CorruptionError(f"{self._source.describe()}: its head or its padding is damaged")

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
        open_stored_shard(store, whole, workers, ref).verify(OtherObjects(own_prefix=key))
    except CorruptionError:
        return True
    return False
