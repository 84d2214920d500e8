"""One shard file out of the store: ranges in parallel, each chunk verified, into a writer in order.

Ranged GETs carry no checksum, so nothing is believed: the end of the object is read first (it checks
itself), and says the CRC32C of every other byte. A transfer that broke goes on at its last byte; a
chunk with wrong bytes is asked for once more, and only that chunk. The writer then sees bytes that
were verified, and checks identity and BLAKE3 itself. Of a payload at most MAX_AHEAD_BYTES are in memory,
and its chunk table.

The chunks of a packed shard come from the objects that store them; head, padding and trailer are made
from its index.
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.format.digest import crc32c
from holdfast_core.format.shard import Trailer, head_bytes, pack_head, pack_trailer, trailer_offset
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.tiers.base import CopyWriter, OpenWriter, ShardRecord
from holdfast_core.tiers.object_ranges import (
    Piece,
    Segment,
    longest_piece,
    plan_extents,
    plan_pieces,
)
from holdfast_core.tiers.object_source import READS, Source
from holdfast_core.tiers.object_stored import KeyOf, StoredShards, places_in
from holdfast_core.tiers.retry import Retrier
from holdfast_core.tiers.s3_client import S3Client

_LOG = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
MAX_AHEAD_BYTES = 48 << 20
"""Of one download; a sidecar runs few, within 1 GiB."""


def download_shard(
    client: S3Client,
    retrier: Retrier,
    workers: ThreadPoolExecutor,
    key_of: KeyOf,
    ref: ShardRef,
    open_writer: OpenWriter,
) -> ShardRecord:
    """Blocks until the writer has committed. Raises NotFoundError, CorruptionError (the second read
    of the same bytes did not verify either, or what a pack refers to is not there),
    UnavailableError, and what the writer raises."""
    shards = StoredShards(client, retrier, key_of)
    stored = shards.find(ref)
    source = Source(client, retrier, stored.key)
    trailer = stored.trailer
    record = trailer.record
    if stored.index is None:
        pieces = plan_pieces(trailer, PIECE_BYTES)
        before, after = b"", stored.tail
    else:
        places = places_in(shards, stored)
        places.look(workers)
        pieces = plan_extents(trailer, places.of(range(len(trailer.table))), PIECE_BYTES)
        header = record.header
        padding = trailer_offset(header) - head_bytes(header) - header.payload_bytes
        before = pack_head(header)
        after = bytes(padding) + pack_trailer(header, record.blake3, trailer.table)
    writer = open_writer(ref, record.file_bytes)
    try:
        if before:
            writer.write(before)
        _copy(source, workers, trailer, pieces, writer)
        writer.write(after)
    except BaseException:
        writer.abort()
        raise
    return writer.commit()


def _copy(
    source: Source,
    workers: ThreadPoolExecutor,
    trailer: Trailer,
    left: Iterator[Piece],
    writer: CopyWriter,
) -> None:
    """Pieces are fetched by the workers and written here, in order."""
    longest = longest_piece(trailer, PIECE_BYTES)
    needed = trailer.record.file_bytes // longest + 1
    count = max(1, min(needed, MAX_AHEAD_BYTES // longest))
    # Anonymous maps: a bytearray would be filled with zeros first. Unmapped when nobody holds them.
    free = [memoryview(mmap.mmap(-1, longest)) for _ in range(count)]
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
        raise UnavailableError(f"{source.describe()}: the tier is being closed") from error
    finally:
        # Whoever fails first leaves nobody behind who still writes into a buffer.
        source.stopped.set()
        for future, _, _ in waiting:
            future.cancel()
        wait([future for future, _, _ in waiting])


def _submit(
    source: Source,
    workers: ThreadPoolExecutor,
    left: Iterator[Piece],
    free: list[memoryview],
    waiting: deque[tuple[Future[None], memoryview, ByteRange]],
) -> None:
    """Fetches as many pieces as there are free buffers."""
    while free and (piece := next(left, None)) is not None:
        buffer = free.pop()
        future = workers.submit(_fetch, source, piece, buffer)
        waiting.append((future, buffer, piece.span))


def _fetch(source: Source, piece: Piece, buffer: memoryview) -> None:
    """One piece, verified. Raises CorruptionError for a segment that is wrong at every read, or an
    object of another checkpoint that is gone."""
    start, offset = piece.span.start, piece.span.start
    if piece.key is not None:
        source, offset = replace(source, key=piece.key), piece.offset
    try:
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


def _check(source: Source, offset: int, segment: Segment, found: int) -> None:
    if found != segment.crc32c:
        raise CorruptionError(
            f"{source.describe()}: bytes {offset} to {offset + segment.span.length_bytes}: expected "
            f"CRC32C {segment.crc32c:08x}, found {found:08x} at {READS} reads"
        )
