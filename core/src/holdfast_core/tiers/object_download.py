"""One shard file out of the store: ranges in parallel, each chunk verified, into a writer in order.

Ranged GETs carry no checksum, so nothing is believed: the trailer is read first (it checks itself),
and says the CRC32C of every other byte. A transfer that broke goes on at its last byte; a chunk
with wrong bytes is asked for once more, and only that chunk. The writer then sees bytes that were
verified, and checks identity and BLAKE3 itself. Of a shard at most MAX_AHEAD_BYTES are in memory.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, NotFoundError, TierError, UnavailableError
from holdfast_core.format.digest import crc32c
from holdfast_core.format.shard import FOOTER, Trailer, trailer_bytes_of, unpack_trailer
from holdfast_core.format.stream import check_ref
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.tiers.base import CopyWriter, OpenWriter, ShardRecord
from holdfast_core.tiers.object_ranges import Piece, Segment, longest_piece, plan_pieces
from holdfast_core.tiers.retry import Retrier
from holdfast_core.tiers.s3_client import S3Client, S3Request

_LOG = logging.getLogger(__name__)
PIECE_BYTES = 8 << 20
MAX_AHEAD_BYTES = 48 << 20
"""Of one download; a sidecar runs few, within 1 GiB."""
_TAIL_BYTES = 1 << 20
"""Read at first: holds the trailer of a payload of up to 7 GiB."""
_PROGRESS_BYTES = 1 << 20
"""A broken transfer that brought this much is not a failure: it goes on with a fresh budget. Less
counts, or a server that cuts after every byte would be asked for ever."""
_READS = 2
"""Bytes that do not verify are read once more: a bit may have flipped on the way."""


class _StoppedError(TierError):
    """A range that was not asked for because another one failed. Never leaves here."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one shard is read from, and with which patience."""

    client: S3Client
    retrier: Retrier
    key: str
    stopped: threading.Event
    """Set when the download failed elsewhere: nothing more is asked for."""

    def fill(self, start: int, buffer: memoryview) -> None:
        """Bytes [start, start + len(buffer)). Raises NotFoundError, UnavailableError."""
        filled = 0
        while filled < len(buffer):
            rest = buffer[filled:]
            filled += self.retrier.call(
                f"download of {self.key}",
                lambda at=start + filled, rest=rest: self._pull(at, rest),  # type: ignore[misc]
            )

    def _pull(self, start: int, buffer: memoryview) -> int:
        """One GET. Bytes received: fewer than asked for when it broke after some progress."""
        filled = 0
        if self.stopped.is_set():
            raise _StoppedError(f"download of {self.key}: another range failed")
        try:
            with self.client.stream_range(self.key, start, start + len(buffer)) as reply:
                while filled < len(buffer):
                    count = reply.read_into(buffer[filled:])
                    if count == 0:
                        raise UnavailableError(
                            f"{self.describe()}: the reply ended at byte {start + filled}, "
                            f"expected {start + len(buffer)}"
                        )
                    filled += count
        except UnavailableError:
            if filled < _PROGRESS_BYTES:
                raise
        return filled

    def describe(self) -> str:
        return self.client.describe(S3Request("GET", self.key))


def download_shard(
    client: S3Client,
    retrier: Retrier,
    workers: ThreadPoolExecutor,
    key: str,
    ref: ShardRef,
    open_writer: OpenWriter,
) -> ShardRecord:
    """Blocks until the writer has committed. Raises NotFoundError, CorruptionError (the second read
    of the same bytes did not verify either), UnavailableError, and what the writer raises."""
    found = retrier.look(f"look for {key}", lambda: client.head(key))
    if found is None:
        raise NotFoundError(f"{client.describe(S3Request('HEAD', key))}: no such shard")
    source = Source(client, retrier, key, threading.Event())
    trailer, tail = read_trailer(source, ref, found.size_bytes)
    writer = open_writer(ref, found.size_bytes)
    try:
        _copy(source, workers, trailer, writer)
        writer.write(tail)
    except BaseException:
        writer.abort()
        raise
    return writer.commit()


def read_trailer(
    source: Source, ref: ShardRef, size_bytes: int, first_bytes: int = _TAIL_BYTES
) -> tuple[Trailer, bytes]:
    """The trailer and its bytes, of the shard that was asked for; `first_bytes` of the object's end
    are asked for, and all of it where that is not enough. Raises CorruptionError, NotFoundError,
    UnavailableError."""
    for _ in range(_READS - 1):
        try:
            return _read_trailer_once(source, ref, size_bytes, first_bytes)
        except CorruptionError as error:
            _LOG.warning("%s: reading its trailer once more: %s", source.describe(), error)
    return _read_trailer_once(source, ref, size_bytes, first_bytes)


def _read_trailer_once(
    source: Source, ref: ShardRef, size_bytes: int, first_bytes: int
) -> tuple[Trailer, bytes]:
    tail = _last_bytes(source, min(size_bytes, first_bytes), size_bytes)
    length = trailer_bytes_of(tail[-FOOTER.size :])
    if length > size_bytes:
        raise CorruptionError(
            f"{source.describe()}: a trailer of {length} bytes in a file of {size_bytes}"
        )
    if length > len(tail):
        tail = _last_bytes(source, length, size_bytes)
    tail = tail[-length:]
    trailer = unpack_trailer(tail)
    check_ref(trailer.record, ref)
    if trailer.record.file_bytes != size_bytes:
        raise CorruptionError(
            f"{source.describe()}: has {size_bytes} bytes, its trailer means "
            f"{trailer.record.file_bytes}"
        )
    return trailer, tail


def _last_bytes(source: Source, count: int, size_bytes: int) -> bytes:
    data = bytearray(count)
    if count:
        source.fill(size_bytes - count, memoryview(data))
    return bytes(data)


def _copy(
    source: Source, workers: ThreadPoolExecutor, trailer: Trailer, writer: CopyWriter
) -> None:
    """Pieces are fetched by the workers and written here, in order."""
    longest = longest_piece(trailer, PIECE_BYTES)
    needed = trailer.record.file_bytes // longest + 1
    count = max(1, min(needed, MAX_AHEAD_BYTES // longest))
    # Anonymous maps: a bytearray would be filled with zeros first. Unmapped when nobody holds them.
    free = [memoryview(mmap.mmap(-1, longest)) for _ in range(count)]
    waiting: deque[tuple[Future[None], memoryview, ByteRange]] = deque()
    left = plan_pieces(trailer, PIECE_BYTES)
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
    """One piece, verified. Raises CorruptionError for a segment that is wrong at every read."""
    start = piece.span.start
    source.fill(start, buffer[: piece.span.length_bytes])
    for segment in piece.segments:
        place = buffer[segment.span.start - start : segment.span.stop - start]
        for _ in range(_READS - 1):
            if crc32c(place) != segment.crc32c:
                _LOG.warning(
                    "%s: bytes %s did not verify, reading them once more",
                    source.describe(),
                    segment.span,
                )
                source.fill(segment.span.start, place)
        _check(source, segment, crc32c(place))


def _check(source: Source, segment: Segment, found: int) -> None:
    if found != segment.crc32c:
        raise CorruptionError(
            f"{source.describe()}: bytes {segment.span.start} to {segment.span.stop}: expected "
            f"CRC32C {segment.crc32c:08x}, found {found:08x} at {_READS} reads"
        )
