"""Position and verification of the chunks of a shard's payload. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from holdfast_core.errors import FormatError
from holdfast_core.format.digest import chunk_digest
from holdfast_core.ids import ByteRange
from holdfast_core.shards.file import Trailer, chunk_count
from holdfast_core.shards.record import ShardHeader

FindBad = Callable[[Trailer, range, memoryview], Iterable[int]]
"""Returns those of some chunks whose bytes do not verify."""


def payload_span(header: ShardHeader, chunks: range) -> ByteRange:
    """Return the byte range of consecutive chunks in the payload.

    Raises FormatError if `chunks` is empty or not within the payload.
    """
    if chunks.step != 1 or not 0 <= chunks.start < chunks.stop <= chunk_count(header):
        raise FormatError(
            f"shard of rank {header.rank} step {header.step}: expected chunks below "
            f"{chunk_count(header)}, found {chunks}"
        )
    stop = min(chunks.stop * header.chunk_bytes, header.payload_bytes)
    return ByteRange(chunks.start * header.chunk_bytes, stop)


def payload_runs(header: ShardHeader, run_bytes: int) -> Iterator[range]:
    """Cut the payload into runs of whole chunks of about `run_bytes` each, in order."""
    count, total = max(1, run_bytes // header.chunk_bytes), chunk_count(header)
    return (range(first, min(first + count, total)) for first in range(0, total, count))


def bad_chunks(trailer: Trailer, chunks: range, data: memoryview) -> list[int]:
    """Return those of `chunks`, whose bytes are in `data`, that do not match their BLAKE3 in the table."""
    size = trailer.record.header.chunk_bytes
    return [
        chunk
        for place, chunk in enumerate(chunks)
        if chunk_digest(data[place * size : (place + 1) * size]) != trailer.table.digest(chunk)
    ]
