"""What tiers share: the source over an open shard file, the places that were asked, and the thread pool."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, ParamSpec, TypeVar

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.ids import ByteRange
from holdfast_core.shards.file import Trailer, bad_chunks, head_bytes, payload_span
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import ShardReader

AHEAD_BYTES = 4 << 20
"""Longest range of `ShardReader.read_file`. A longer run is copied once more, to be in one piece."""


class ReaderSource(Closing):
    """ShardSource that reads from a ShardReader and owns it. Chunks are verified by BLAKE3."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._buffer = memoryview(b"")

    @property
    def trailer(self) -> Trailer:
        return Trailer(self._reader.record, self._reader.table)

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See ShardSource. Several runs are read ahead, past the page cache: a shard is read once."""
        runs = iter(wanted)
        first = tuple(itertools.islice(runs, 2))
        read = self._read_one if len(first) < 2 else self._read_ahead
        return read(itertools.chain(first, runs))

    def _read_one(self, wanted: Iterable[range]) -> Generator[memoryview]:
        return (self._read_again(chunks) for chunks in wanted)

    def _read_again(self, chunks: range) -> memoryview:
        """Read one run. Raises CorruptionError that names the first bad chunk."""
        span = payload_span(self._reader.record.header, chunks)
        view = self._room(span.length_bytes)
        self._reader.read_payload_into(span.start, view)
        if bad := bad_chunks(self.trailer, chunks, view):
            raise CorruptionError(
                f"shard of {self._reader.record.ref}: BLAKE3 of chunk {bad[0]} does not match"
            )
        return view

    def _read_ahead(self, wanted: Iterable[range]) -> Generator[memoryview]:
        header = self._reader.record.header
        begun: deque[range] = deque()

        def pieces() -> Iterator[ByteRange]:
            for chunks in wanted:
                begun.append(chunks)
                span = payload_span(header, chunks)
                for start in range(span.start, span.stop, AHEAD_BYTES):
                    stop = min(start + AHEAD_BYTES, span.stop)
                    yield ByteRange(*(head_bytes(header) + at for at in (start, stop)))

        with (
            closing(self._reader.read_file(pieces())) as views,
            ThreadPoolExecutor(1, "holdfast-verify") as helper,
        ):
            for view in views:
                chunks = begun.popleft()
                length = payload_span(header, chunks).length_bytes
                if length > AHEAD_BYTES:
                    view = self._joined(view, views, length)
                half = len(chunks) // 2
                middle = half * header.chunk_bytes
                other = helper.submit(bad_chunks, self.trailer, chunks[half:], view[middle:])
                bad = bad_chunks(self.trailer, chunks[:half], view[:middle]) + other.result()
                # Read again, because a bit may have flipped in transit. This names a chunk that is bad.
                yield self._read_again(chunks) if bad or len(view) != length else view

    def _joined(self, first: memoryview, views: Iterator[memoryview], length: int) -> memoryview:
        """Return a run that was read in several pieces."""
        whole, position = self._room(length), 0
        for view in itertools.chain((first,), views):
            whole[position : position + len(view)] = view
            position += len(view)
            if position == length:
                break
        return whole[:position]

    def _room(self, length: int) -> memoryview:
        if len(self._buffer) < length:
            self._buffer = memoryview(bytearray(length))
        return self._buffer[:length]

    def close(self) -> None:
        self._reader.close()


class SourceErrors:
    """Errors of one attempt. `str()` joins them into one message, which begins with the last one.

    The object store is asked last and has the last word. The operator shows the first error in Events, and
    leaves the others to the log.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self.retryable = False
        """Whether a retry may succeed, because a place was unreachable or busy and may have the data."""

    def failed(self, what: str, error: BaseException) -> None:
        """Add the error of a place. It sets `retryable` unless the place has no good copy for sure."""
        self.add(f"{what}: {error}")
        if isinstance(error, UnreadableError):
            self.retryable = self.retryable or error.may_pass
        else:
            self.retryable = self.retryable or not isinstance(error, NotFoundError | FormatError)

    def add(self, text: str) -> None:
        """Add a message about a place that does not have the data."""
        self._text.append(text)

    def __str__(self) -> str:
        return "; ".join(reversed(self._text))


P = ParamSpec("P")
T = TypeVar("T")

CLOSING = "the tier is being closed"


def submit(workers: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Submit the call to the pool. Raises UnavailableError if the pool is shut down."""
    try:
        return workers.submit(call, *args, **kwargs)
    except RuntimeError as error:
        raise UnavailableError(CLOSING) from error


def run_all(workers: Executor, call: Callable[[T], object], items: Iterable[T]) -> None:
    """Make the call for each item in the pool.

    Raises the error of the first call that failed; no further call is begun then. Raises UnavailableError
    if the pool is shut down before all calls were made.
    """
    futures: list[Future[object]] = []
    try:
        for item in items:
            futures.append(submit(workers, call, item))
        for future in futures:
            future.result()
    except CancelledError as error:
        raise UnavailableError(CLOSING) from error
    finally:
        for future in futures:
            future.cancel()


def wait_all(futures: Iterable[Future[Any]]) -> None:
    """Wait until each future has ended or is cancelled. Errors of the futures are ignored.

    `concurrent.futures.wait` is not usable here: it never returns for a future that
    `shutdown(cancel_futures=True)` took out of the queue, because only a worker thread would notify it.
    """
    for future in futures:
        with contextlib.suppress(CancelledError):
            future.exception()
