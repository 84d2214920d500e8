"""ShardSource over an open shard file. A store that is a directory uses it."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from holdfast_core.closing import Closing
from holdfast_core.shards.chunks import payload_span
from holdfast_core.shards.file import Trailer
from holdfast_core.tiers.base import ShardReader


class ReaderSource(Closing):
    """ShardSource that reads from a ShardReader and owns it. Chunks are verified by CRC32C only."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._buffer = memoryview(b"")

    @property
    def trailer(self) -> Trailer:
        return Trailer(self._reader.record, self._reader.table)

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        header = self._reader.record.header
        for chunks in wanted:
            span = payload_span(header, chunks)
            if len(self._buffer) < span.length_bytes:
                self._buffer = memoryview(bytearray(span.length_bytes))
            view = self._buffer[: span.length_bytes]
            self._reader.read_payload_into(span.start, view)
            yield view

    def close(self) -> None:
        self._reader.close()
