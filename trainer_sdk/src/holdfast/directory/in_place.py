"""Reads a shard of a folder straight into the tensors of a state, without a slot in between.

1. What is no tensor is read first, and the state is asked whether all of it fits: nothing has been
   written into it then.
2. The file is read in order, each chunk verified, each byte put where it belongs.

A copy that turns out bad in 2 leaves a part of itself behind: the caller must load another one over it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from holdfast.state.destinations import Destinations
from holdfast.state.tensors import Leaf
from holdfast_core.format.payload import LENGTH_BYTES, header_bytes, parse_payload
from holdfast_core.ids import ByteRange
from holdfast_core.tiers.disk import BufferPool, disk_errors
from holdfast_core.tiers.disk_shard import WRITE_BYTES, DiskShardReader
from holdfast_core.transfer.messages import ShardFile


def read_in_place(
    file: ShardFile, leaves: tuple[Leaf, ...], fits: Callable[[dict[str, Any]], bool]
) -> dict[str, Any] | None:
    """The saved state, in the memory of `leaves` and in new memory; None where it does not fit, and
    nothing was written. Raises CorruptionError, FormatError, NotFoundError, UnavailableError."""
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
        position = 0
        with closing(reader.read_payload()) as pieces:
            for piece in pieces:
                destinations.put(position, piece)
                position += len(piece)
    return destinations.saved


def _read(reader: DiskShardReader, wanted: ByteRange) -> bytes:
    """Any stretch of the payload, by the chunks that it lies in."""
    header = reader.record.header
    chunk = header.chunk_bytes
    start = wanted.start // chunk * chunk
    stop = min(-(-wanted.stop // chunk) * chunk, header.payload_bytes)
    buffer = bytearray(stop - start)
    reader.read_payload_into(start, memoryview(buffer))
    return bytes(buffer[wanted.start - start : wanted.stop - start])
