"""Reads a shard of a folder straight into the tensors of a state, without a slot in between.

1. What is no tensor is read first, and the state is asked whether all of it fits: nothing has been
   written into it then.
2. Where a slot may still hold the shard, its chunks are compared with the file's table and put where
   they belong; if one differs, all that was put is overwritten by 3.
3. The file is read in order, each chunk verified, each byte put where it belongs.

A copy that turns out bad in 3 leaves a part of itself behind: the caller must load another one over it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.state.destinations import Destinations
from holdfast.state.tensors import Leaf
from holdfast_core.errors import CorruptionError
from holdfast_core.format.digest import crc32c
from holdfast_core.format.payload import LENGTH_BYTES, header_bytes, parse_payload
from holdfast_core.ids import ByteRange, TierName
from holdfast_core.messages.schema import ShardFile
from holdfast_core.node.files import BufferPool, disk_errors
from holdfast_core.node.shard_file import WRITE_BYTES, DiskShardReader

_CHUNKS_AT_ONCE = 4
"""Compared, then put while they are in the processor's cache: 1 MiB, as shards are written now."""


@dataclass(frozen=True, slots=True)
class InPlace:
    saved: dict[str, Any]
    """In the memory of the state's tensors, and in new memory."""
    tier: TierName
    """Where the bytes came from."""


def read_in_place(
    file: ShardFile,
    leaves: tuple[Leaf, ...],
    fits: Callable[[dict[str, Any]], bool],
    held: memoryview | None = None,
    begins: Callable[[], None] = lambda: None,
) -> InPlace | None:
    """None where the state does not fit, and nothing was written. `held`: what lies in `file.slot`;
    `begins` is called before the first byte is written.
    Raises CorruptionError, FormatError, NotFoundError, UnavailableError."""
    path = Path(file.path)
    with disk_errors(f"opening shard {path}"):
        reader = DiskShardReader.open(path, file.shard, BufferPool(WRITE_BYTES, keep=1))
    with reader:
        size = reader.record.header.payload_bytes
        head_stop = header_bytes(_read(reader, ByteRange(0, LENGTH_BYTES)), size)
        plan = parse_payload(_read(reader, ByteRange(0, head_stop)), size)
        destinations = Destinations(plan, _read(reader, plan.objects), leaves)
        if not fits(destinations.saved):
            return None
        begins()
        if held is not None and _put_held(reader, destinations, held[:size]):
            return InPlace(destinations.saved, TierName.MEMORY)
        position, done = 0, 0
        with closing(reader.read_payload()) as pieces:
            for piece in pieces:
                done += destinations.put(position, piece)
                position += len(piece)
    _expect_all(destinations, done)
    return InPlace(destinations.saved, file.tier)


def _put_held(reader: DiskShardReader, destinations: Destinations, held: memoryview) -> bool:
    """Whether every chunk is the shard's, and was put. By two threads."""
    chunk, crcs = reader.record.header.chunk_bytes, reader.table.crcs

    def put(chunks: range) -> int | None:
        done = 0
        for first in range(chunks.start, chunks.stop, _CHUNKS_AT_ONCE):
            numbers = range(first, min(first + _CHUNKS_AT_ONCE, chunks.stop))
            for number in numbers:
                if crc32c(held[number * chunk : (number + 1) * chunk]) != crcs[number]:
                    return None
            done += destinations.put(first * chunk, held[first * chunk : numbers.stop * chunk])
        return done

    half = len(crcs) // 2
    with ThreadPoolExecutor(1, "holdfast-put") as helper:
        other = helper.submit(put, range(half, len(crcs)))
        counts = put(range(half)), other.result()
    if counts[0] is None or counts[1] is None:
        return False
    _expect_all(destinations, counts[0] + counts[1])
    return True


def _expect_all(destinations: Destinations, done: int) -> None:
    """A tensor that nobody wrote to would keep what it had, without a sign of it."""
    if done != destinations.wanted_bytes:
        raise CorruptionError(
            f"{done} bytes of the payload found their place in the state, "
            f"{destinations.wanted_bytes} expected"
        )


def _read(reader: DiskShardReader, wanted: ByteRange) -> bytes:
    """Any stretch of the payload, by the chunks that it lies in."""
    header = reader.record.header
    chunk = header.chunk_bytes
    start = wanted.start // chunk * chunk
    stop = min(-(-wanted.stop // chunk) * chunk, header.payload_bytes)
    buffer = bytearray(stop - start)
    reader.read_payload_into(start, memoryview(buffer))
    return bytes(buffer[wanted.start - start : wanted.stop - start])
