"""Copy of a whole shard file from a store or a peer. Chunks that this node has already are not requested.

The copy is a whole file that depends on no other (ADR 0020). It is written in order: the head, which the
trailer determines, then the payload from the source and from this node, then padding and trailer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from holdfast_core.ids import ShardRef
from holdfast_core.shards.file import Trailer, head_bytes, pack_head, pack_trailer, trailer_offset
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.tiers.base import CopyWriter, OpenWriter


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
