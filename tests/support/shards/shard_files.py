"""Shard files outside a node tier, for tests of the code that sends and receives them.

For tests only. The files are not fsynced, and tests can damage them.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.shards.builders import shard_file

from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.node.files import BufferPool
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.file import ShardHeader, ShardRecord, head_bytes, payload_span
from holdfast_core.shards.stream import ShardStream

_BUFFERS = BufferPool(1 << 20, keep=2)


def write_shard(directory: Path, header: ShardHeader, payload: bytes) -> DiskShardReader:
    """Write the shard file and open it. The caller closes the reader."""
    data, record = shard_file(header, payload)
    path = directory / f"{record.blake3[3:19]}-{header.step}-{header.rank}.shard"
    path.write_bytes(data)
    return DiskShardReader.open(path, record.ref, _BUFFERS)


def flip_bit(path: Path, offset: int) -> None:
    """Invert one bit of a file, as a failing disk would."""
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 0x10]), offset)
    finally:
        os.close(fd)


class FileCopyWriter:
    """CopyWriter into a plain file. It verifies the bytes as the node tier does."""

    def __init__(self, path: Path, ref: ShardRef, file_bytes: int) -> None:
        self.path = path
        self.aborted = False
        self._stream = ShardStream(ref, file_bytes)
        self._file = path.open("wb")
        self._room = memoryview(b"")

    @property
    def offset(self) -> int:
        return self._stream.position

    def room(self, length: int) -> memoryview:
        self._room = memoryview(bytearray(length))
        return self._room

    def advance(self, length: int) -> None:
        self.write(self._room[:length])

    def write(self, data: memoryview | bytes) -> None:
        self._stream.feed(memoryview(data))
        self._file.write(data)

    def commit(self) -> ShardRecord:
        self._file.close()
        return self._stream.finish().record

    def abort(self) -> None:
        self.aborted = True
        self._file.close()
        self.path.unlink()


class CopyWriters:
    """OpenWriter that keeps the writers that it opened."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.opened: list[FileCopyWriter] = []

    def __call__(self, ref: ShardRef, file_bytes: int) -> FileCopyWriter:
        path = self._directory / f"copy{len(self.opened)}-{ref.rank}"
        self.opened.append(FileCopyWriter(path, ref, file_bytes))
        return self.opened[-1]


def file_span(header: ShardHeader, chunks: range) -> ByteRange:
    """Return the byte range of consecutive chunks in the shard file."""
    span = payload_span(header, chunks)
    start = head_bytes(header)
    return ByteRange(start + span.start, start + span.stop)
