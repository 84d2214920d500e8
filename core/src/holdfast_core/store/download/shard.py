"""Download of one shard: ranges are fetched in parallel, verified, and written in order.

A reply to a ranged GET carries no checksum. The end of the object is therefore read first: it has its own
checksum, and its chunk table has the CRC32C of every other range. A broken transfer resumes after its last
received byte. A wrong range is fetched again, alone. The writer receives only verified bytes, and it
verifies identity and BLAKE3 itself. At most MAX_AHEAD_BYTES of the payload, and the chunk table, are in
memory.

The chunks of a packed shard come from the objects that store them; head, padding and trailer are made
from its index. The worker that fetches a compressed chunk also decodes and verifies it.
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.format.digest import crc32c
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.shards.coding import Coding
from holdfast_core.shards.file import head_bytes, pack_head, pack_trailer, trailer_offset
from holdfast_core.store.download.decode import fill_decoded
from holdfast_core.store.download.ranges import (
    Piece,
    Segment,
    longest_piece,
    plan_extents,
    plan_pieces,
)
from holdfast_core.store.download.source import READS, Source
from holdfast_core.store.download.stored import KeyOf, StoredShards, places_in
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.retry import Retrier
from holdfast_core.tiers.base import CopyWriter, OpenWriter, ShardRecord
from holdfast_core.tiers.pooled import CLOSING, submit, wait_all

_LOG = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
"""Payload bytes of one ranged GET, unless a single chunk is longer; half of it if a chunk is compressed."""
MAX_AHEAD_BYTES = 48 << 20
"""Memory limit of one download's buffers, including compressed bytes. A sidecar, whose memory limit is
1 GiB, runs a few downloads at a time."""


def download_shard(
    client: S3Client,
    retrier: Retrier,
    workers: ThreadPoolExecutor,
    key_of: KeyOf,
    ref: ShardRef,
    open_writer: OpenWriter,
) -> ShardRecord:
    """Download a shard that is stored whole or as a pack. Block until the writer has committed.

    Args:
        client: Client of the store.
        retrier: Retry policy of the requests.
        workers: Threads that fetch the ranges.
        key_of: Returns the key of a shard or of its pack.
        ref: The shard.
        open_writer: Opens the writer, once the length of the shard file is known. The writer is aborted
            if the download fails.

    Returns:
        The record of the committed shard.

    Raises:
        NotFoundError: The store has neither the shard nor its pack.
        CorruptionError: Bytes were wrong at every read, or a shard to which the pack refers is gone.
        UnavailableError: The retry policy is spent, or the tier is being closed.
        HoldfastError: Whatever else the writer raises.
    """
    shards = StoredShards(client, retrier, key_of)
    stored = shards.find(ref)
    source = Source(client, retrier, stored.key)
    trailer = stored.trailer
    record = trailer.record
    piece_bytes, held_twice = PIECE_BYTES, False
    if stored.index is None:
        pieces = plan_pieces(trailer, PIECE_BYTES)
        before, after = b"", stored.tail
    else:
        places = places_in(shards, stored)
        places.look(workers)
        extents = list(places.of(range(len(trailer.table))))
        held_twice = any(extent.coding is not None for extent in extents)
        piece_bytes = PIECE_BYTES // 2 if held_twice else PIECE_BYTES
        pieces = plan_extents(trailer, extents, piece_bytes)
        header = record.header
        padding = trailer_offset(header) - head_bytes(header) - header.payload_bytes
        before = pack_head(header)
        after = bytes(padding) + pack_trailer(header, record.blake3, trailer.table)
    writer = open_writer(ref, record.file_bytes)
    try:
        if before:
            writer.write(before)
        longest = longest_piece(trailer, piece_bytes)
        ahead_bytes = MAX_AHEAD_BYTES // 2 if held_twice else MAX_AHEAD_BYTES
        _copy(source, workers, pieces, writer, _buffers(record, longest, ahead_bytes))
        writer.write(after)
    except BaseException:
        writer.abort()
        raise
    return writer.commit()


def _buffers(record: ShardRecord, longest: int, ahead_bytes: int) -> list[memoryview]:
    needed = record.file_bytes // longest + 1
    count = max(1, min(needed, ahead_bytes // longest))
    # Anonymous maps, because a bytearray would be filled with zeros first. A map is released with its
    # last memoryview.
    return [memoryview(mmap.mmap(-1, longest)) for _ in range(count)]


def _copy(
    source: Source,
    workers: ThreadPoolExecutor,
    left: Iterator[Piece],
    writer: CopyWriter,
    free: list[memoryview],
) -> None:
    """Fetch the pieces on the workers, into the free buffers, and write them here, in order."""
    waiting: deque[tuple[Future[None], memoryview, ByteRange]] = deque()
    try:
        _submit(source, workers, left, free, waiting)
        while waiting:
            future, buffer, span = waiting[0]
            future.result()
            writer.write(buffer[: span.length_bytes])
            waiting.popleft()
            free.append(buffer)
            _submit(source, workers, left, free, waiting)
    except CancelledError as error:
        raise UnavailableError(f"{source.describe()}: {CLOSING}") from error
    finally:
        # No worker may write into a buffer after this function has returned.
        source.stopped.set()
        for future, _, _ in waiting:
            future.cancel()
        wait_all(future for future, _, _ in waiting)


def _submit(
    source: Source,
    workers: ThreadPoolExecutor,
    left: Iterator[Piece],
    free: list[memoryview],
    waiting: deque[tuple[Future[None], memoryview, ByteRange]],
) -> None:
    """Begin to fetch as many pieces as there are free buffers."""
    while free and (piece := next(left, None)) is not None:
        buffer = free.pop()
        future = submit(workers, _fetch, source, piece, buffer)
        waiting.append((future, buffer, piece.span))


def _fetch(source: Source, piece: Piece, buffer: memoryview) -> None:
    """Fetch one piece into the buffer and verify it.

    Raises CorruptionError for a segment that is wrong at every read, and if an object that stores chunks
    of a packed shard is gone.
    """
    start, offset = piece.span.start, piece.span.start
    if piece.key is not None:
        source, offset = replace(source, key=piece.key), piece.offset
    try:
        if piece.coding is not None:
            _fetch_coded(source, offset, piece, piece.coding, buffer)
            return
        source.fill(offset, buffer[: piece.span.length_bytes])
        for segment in piece.segments:
            at = segment.span.start - start
            place = buffer[at : at + segment.span.length_bytes]
            for _ in range(READS - 1):
                if crc32c(place) != segment.crc32c:
                    _LOG.warning(
                        "%s: bytes from %d did not verify, reading them once more",
                        source.describe(),
                        offset + at,
                    )
                    source.fill(offset + at, place)
            _check(source, offset + at, segment, crc32c(place))
    except NotFoundError as error:
        if piece.key is None:
            raise
        raise CorruptionError(f"{source.describe()}: stores chunks of a pack: {error}") from error


def _fetch_coded(
    source: Source, offset: int, piece: Piece, coding: Coding, buffer: memoryview
) -> None:
    spans = [segment.span for segment in piece.segments]
    places = [buffer[s.start - piece.span.start : s.stop - piece.span.start] for s in spans]

    def is_good(position: int, place: memoryview) -> bool:
        return crc32c(place) == piece.segments[position].crc32c

    bad = fill_decoded(source, offset, coding, places, is_good)
    if bad:
        raise CorruptionError(
            f"{source.describe()}: the chunks of payload that begin at bytes "
            f"{[spans[position].start for position in bad[:8]]} of the shard file do not decode to "
            f"what its chunk table says, at {READS} reads"
        )


def _check(source: Source, offset: int, segment: Segment, found: int) -> None:
    if found != segment.crc32c:
        raise CorruptionError(
            f"{source.describe()}: bytes {offset} to {offset + segment.span.length_bytes}: expected "
            f"CRC32C {segment.crc32c:08x}, found {found:08x} at {READS} reads"
        )
