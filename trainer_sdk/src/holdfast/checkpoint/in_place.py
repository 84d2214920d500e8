"""Reads the file of a shard directly into the tensors of a state, without a slot in between.

1. The objects that are not tensors are read first, and all of the shard is compared with the state.
   Nothing has been written into the state at this point.
2. If a slot may still hold the shard, its chunks are compared with the checksums of the file and copied
   into the tensors. If a chunk differs, step 3 overwrites all that was copied.
3. Otherwise the file is read in order. Each chunk is verified and then copied into the tensors.

If a chunk fails verification in step 3, the chunks before it are in the state. The caller must load another
copy over them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.state.loading.destinations import Destinations
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast_core.errors import CorruptionError
from holdfast_core.format.canonical import crc32c
from holdfast_core.format.payload import LENGTH_BYTES, header_bytes, parse_payload
from holdfast_core.ids import ByteRange, TierName
from holdfast_core.messages.schema import ShardFile
from holdfast_core.node.files import BufferPool, disk_errors
from holdfast_core.node.shard_file import WRITE_BYTES, DiskShardReader
from holdfast_core.reading import copy_span
from holdfast_core.tiers.sources import ReaderSource

_CHUNKS_AT_ONCE = 4
"""Number of chunks to compare and then copy while they are in the processor's cache. With the chunk size
of new shards this is 1 MiB."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """Result of a read into the tensors of a state."""

    saved: dict[str, Any]
    """The saved state. Its tensors are those of the current state, or lie in new memory."""
    tier: TierName
    """Tier from which the bytes came."""


@dataclass(slots=True)
class _TensorSink:
    """The state's tensors as memory of a read."""

    destinations: Destinations
    done: int = 0
    """Bytes that belong to tensors."""

    def write_payload(self, offset: int, data: memoryview) -> None:
        self.done += self.destinations.put(offset, data)


@dataclass(frozen=True, slots=True)
class _ByteSink:
    data: bytearray

    def write_payload(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


def read_in_place(
    file: ShardFile,
    target: RestoreTarget,
    held: memoryview | None = None,
    begins: Callable[[], None] = lambda: None,
    fd: int | None = None,
) -> InPlace | None:
    """Read the shard into the state's tensors. Return None, without writing, if the state does not fit.

    Args:
        file: The shard's file.
        target: The current state.
        held: Payload of `file.slot`, which may still hold the shard.
        begins: Called before the first byte is written.
        fd: The file, if it is open already. This function closes it.

    Raises:
        CorruptionError, FormatError, NotFoundError, UnavailableError: The shard cannot be read.
        StateMismatchError: A value does not fit its class any more.
    """
    path = Path(file.path)
    with disk_errors(f"opening shard {path}"):
        buffers = BufferPool(WRITE_BYTES, keep=1)
        if fd is None:
            reader = DiskShardReader.open(path, file.shard, buffers)
        else:
            reader = DiskShardReader.of_file(fd, path, file.shard, buffers)
    with ReaderSource(reader) as source:
        size = reader.record.header.payload_bytes
        head_stop = header_bytes(_read(source, ByteRange(0, LENGTH_BYTES)), size)
        plan = parse_payload(_read(source, ByteRange(0, head_stop)), size)
        objects = _read(source, plan.objects)
        destinations = Destinations(plan, objects, target.leaves, target.classes)
        if not target.fits(destinations.saved):
            return None
        begins()
        if held is not None and _put_held(reader, destinations, held[:size]):
            return InPlace(destinations.saved, TierName.MEMORY)
        tensors = _TensorSink(destinations)
        copy_span(source, ByteRange(0, size), tensors)
    _expect_all(destinations, tensors.done)
    return InPlace(destinations.saved, file.tier)


def _put_held(reader: DiskShardReader, destinations: Destinations, held: memoryview) -> bool:
    """Compare and copy the slot's chunks with two threads. Return False if a chunk differs."""
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
    """Raise CorruptionError unless all bytes were copied: a tensor could keep old values unnoticed."""
    if done != destinations.wanted_bytes:
        raise CorruptionError(
            f"{done} bytes of the payload belong to tensors of the state, expected "
            f"{destinations.wanted_bytes}"
        )


def _read(source: ReaderSource, wanted: ByteRange) -> bytes:
    """Return a range of the payload. Reads and verifies the chunks that contain it."""
    found = _ByteSink(bytearray(wanted.length_bytes))
    copy_span(source, wanted, found)
    return bytes(found.data)
