"""ShardSource over an open shard file. A store that is a directory uses it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from holdfast_core.closing import Closing
from holdfast_core.errors import CorruptionError
from holdfast_core.ids import ByteRange
from holdfast_core.shards.chunks import bad_chunks, payload_span
from holdfast_core.shards.file import Trailer, head_bytes
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
