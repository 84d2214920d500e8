"""Write a shard file in one pass over its payload, receive a copy of one, and read and verify it.

Blocks go through a pipe: while the caller fills one, the others are digested and written.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Self

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.format.canonical import crc32c
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.node.files import (
    BufferPool,
    PoisonedError,
    TempFile,
    disk_errors,
    open_to_read,
    pieces,
    read_ahead,
    read_at,
    read_errors,
    write_at,
)
from holdfast_core.shards.file import (
    BLOCK_BYTES,
    FOOTER,
    ChunkTable,
    ShardHeader,
    ShardRecord,
    Trailer,
    align,
    check_trailer,
    expect_zeros,
    head_bytes,
    head_bytes_of,
    pack_head,
    pack_trailer,
    trailer_bytes,
    trailer_offset,
    unpack_head,
    unpack_trailer,
)
from holdfast_core.shards.stream import PayloadDigester, ShardStream, check_ref, check_same
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import PayloadSource


class BlockPipe:
    """Ring of blocks with one thread that digests and two that write. Not thread-safe.

    Two writes are in progress at a time, because a disk is idle between single writes. The caller

    1. gets a block with `begin`,
    2. fills it, and may pass filled parts to `digest`,
    3. passes it to `write`, and begins the next block,
    4. waits for all blocks with `finish`, and
    5. always calls `close` before it closes the file, whose descriptor the threads use.
    """

    def __init__(self, fd: int, blocks: Sequence[memoryview]) -> None:
        self._fd = fd
        self._blocks = blocks
        self._busy: list[list[Future[None]]] = [[] for _ in blocks]
        self._turn = 0
        self._digests = ThreadPoolExecutor(1, "holdfast-node-digest")
        self._writes = ThreadPoolExecutor(2, "holdfast-node-write")

    def begin(self) -> memoryview:
        """Return the next block after its earlier use has ended. Raises the OSError of that use."""
        self._wait(self._turn)
        return self._blocks[self._turn]

    def digest(self, update: Callable[[memoryview], None], data: memoryview) -> None:
        """Call `update` with `data`, a part of the current block, in the order of the calls."""
        self._busy[self._turn].append(self._digests.submit(update, data))

    def write(self, data: memoryview, offset: int) -> None:
        """Start the write of `data`, the filled part of the current block, and move to the next block."""
        self._busy[self._turn].append(self._writes.submit(write_at, self._fd, data, offset))
        self._turn = (self._turn + 1) % len(self._blocks)

    def finish(self) -> None:
        """Wait until all blocks are digested and written. Raises OSError."""
        for turn in range(len(self._blocks)):
            self._wait(turn)

    def close(self) -> None:
        """Wait for the running calls and cancel the others."""
        for threads in (self._digests, self._writes):
            threads.shutdown(cancel_futures=True)

    def _wait(self, turn: int) -> None:
        for future in self._busy[turn]:
            future.result()
        self._busy[turn].clear()


class PipedDigester:
    """Digester that works in the pipe's thread. The data that it gets lies in the pipe's current block."""

    def __init__(self, pipe: BlockPipe, header: ShardHeader) -> None:
        self._pipe = pipe
        self._digester = PayloadDigester(header)

    def update(self, data: memoryview) -> None:
        self._pipe.digest(self._digester.update, data)

    def finish(self) -> tuple[ShardRecord, ChunkTable]:
        self._pipe.finish()
        return self._digester.finish()


WRITE_BYTES = 16 << 20
"""Size of one O_DIRECT write. Larger writes were measured to be no faster."""
_BLOCKS = 3
"""Buffers of a write: two are being written, which keeps a disk busy, while one is filled."""
READ_BACK_EVERY = 64
"""One chunk of this many is read back after a write that is not read back whole."""


def write_payload(
    fd: int, header: ShardHeader, source: PayloadSource, buffers: BufferPool
) -> tuple[ShardRecord, ChunkTable]:
    """Write head, payload and trailer of a shard file, without fsync.

    While one block is read from `source`, two others are digested and written.

    Args:
        fd: The file.
        header: Identity of the shard.
        source: The payload.
        buffers: Pool of the blocks.

    Returns:
        The shard's record and chunk table.

    Raises:
        OSError: The disk failed.
    """
    start = head_bytes(header)
    _write_small(fd, pack_head(header), 0, buffers)
    with ExitStack() as stack:
        pipe = BlockPipe(fd, [stack.enter_context(buffers.take()) for _ in range(_BLOCKS)])
        stack.callback(pipe.close)
        digester = PipedDigester(pipe, header)
        for position in range(0, header.payload_bytes, buffers.size_bytes):
            length = min(buffers.size_bytes, header.payload_bytes - position)
            block = pipe.begin()
            source.read_into(position, block[:length])
            digester.update(block[:length])
            block[length : align(length)] = bytes(align(length) - length)
            pipe.write(block[: align(length)], start + position)
            if position == 0:
                sys.audit("holdfast.node.mid_write")
        record, table = digester.finish()
    trailer = pack_trailer(header, record.blake3, table)
    _write_small(fd, trailer, trailer_offset(header), buffers)
    return record, table


def to_read_back(written: int, chunks: int) -> range:
    """Return the chunks that are read back after a write: all of a rank's first write, then one in 64.

    Other chunks are read at each write, so that each chunk position is read once within 64 writes: a disk
    that stores one place of the shards wrongly is found, at a cost of a few percent of a write (ADR 0018).

    Args:
        written: Number of shards that this process has written for the rank before.
        chunks: Number of chunks of the shard.
    """
    if written == 0:
        return range(chunks)
    return range(written % READ_BACK_EVERY, chunks, READ_BACK_EVERY)


def read_back(
    fd: int,
    record: ShardRecord,
    table: ChunkTable,
    chunks: range,
    buffers: BufferPool,
    verified: Callable[[int], object] = lambda byte_count: None,
) -> None:
    """Read head, trailer and `chunks` from the disk, without the page cache, and compare them.

    Args:
        fd: The file.
        record: What was written.
        table: The chunk table of the payload.
        chunks: The chunks to compare.
        buffers: Pool of the buffers.
        verified: Called with the bytes of each chunk that was compared.

    Raises:
        PoisonedError: The disk has other bytes, or cannot be read.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    header = record.header
    try:
        if read_small(fd, 0, head_bytes(header), buffers) != pack_head(header):
            raise PoisonedError(
                f"read-back of {record.ref}: the head differs from what was written"
            )
        trailer = read_small(fd, trailer_offset(header), trailer_bytes(header), buffers)
        if unpack_trailer(trailer) != Trailer(record, table):
            raise PoisonedError(f"read-back of {record.ref}: the trailer differs")
        for chunk in chunks:
            if _chunk_crc(fd, header, chunk, buffers) != table.crcs[chunk]:
                raise PoisonedError(f"read-back of {record.ref}: chunk {chunk} differs")
            verified(min(header.chunk_bytes, header.payload_bytes - chunk * header.chunk_bytes))
    except (CorruptionError, OSError) as error:
        raise PoisonedError(f"read-back of {record.ref}: {error}") from error


def read_small(fd: int, offset: int, length: int, buffers: BufferPool) -> bytes:
    """Read through an aligned buffer, as O_DIRECT requires. The result is shorter if the file ends."""
    parts: list[bytes] = []
    with buffers.take() as buffer:
        while length > 0:
            wanted = min(length, buffers.size_bytes)
            got = min(read_at(fd, buffer[: align(wanted)], offset), wanted)
            parts.append(bytes(buffer[:got]))
            if got < wanted:
                break
            offset += got
            length -= got
    return b"".join(parts)


def _write_small(fd: int, data: bytes, offset: int, buffers: BufferPool) -> None:
    with buffers.take() as buffer:
        for start in range(0, len(data), buffers.size_bytes):
            piece = data[start : start + buffers.size_bytes]
            buffer[: len(piece)] = piece
            write_at(fd, buffer[: len(piece)], offset + start)


def _chunk_crc(fd: int, header: ShardHeader, chunk: int, buffers: BufferPool) -> int:
    offset = chunk * header.chunk_bytes
    stop = min(offset + header.chunk_bytes, header.payload_bytes)
    crc = 0
    start = head_bytes(header)
    with buffers.take() as buffer:
        while offset < stop:
            length = min(stop - offset, buffers.size_bytes)
            got = read_at(fd, buffer[: align(length)], start + offset)
            crc = crc32c(buffer[: min(got, length)], crc)
            offset += length
    return crc


def read_record(fd: int, path: Path, buffers: BufferPool) -> Trailer:
    """Read head and trailer of an open file and compare them with each other and with its length.

    Raises CorruptionError; FormatError if a newer release wrote the file.
    """
    with read_errors(f"reading shard {path}"):
        size = os.fstat(fd).st_size
    if size < 2 * BLOCK_BYTES or size % BLOCK_BYTES:
        raise CorruptionError(f"shard {path.name}: {size} bytes are not a complete shard file")
    with read_errors(f"reading shard {path}"):
        first = read_small(fd, 0, BLOCK_BYTES, buffers)
        # Check the prefix before its length is used.
        from_head = _checked_head_bytes(first, size)
        head = first if from_head == BLOCK_BYTES else read_small(fd, 0, from_head, buffers)
        header = unpack_head(head)
        start = trailer_offset(header)
        length = trailer_bytes(header)
        if start + length != size:
            raise CorruptionError(
                f"shard {path.name}: {size} bytes, expected at least {start + length} according to "
                "its head"
            )
        return check_trailer(header, unpack_trailer(read_small(fd, start, length, buffers)), size)


def _checked_head_bytes(first: bytes, size: int) -> int:
    length = head_bytes_of(first)
    if length + FOOTER.size > size:
        raise CorruptionError(f"shard head: {length} bytes in a file of {size}")
    return length


class DiskShardReader(Closing):
    """ShardReader of a shard file. The descriptor stays valid if the file is deleted meanwhile."""

    def __init__(self, fd: int, path: Path, trailer: Trailer, buffers: BufferPool) -> None:
        self._fd = fd
        self._path = path
        self._trailer = trailer
        self._buffers = buffers
        self.payload_start = head_bytes(trailer.record.header)
        """Offset of the payload in the file, in bytes."""
        self._closed = False

    @classmethod
    def open(cls, path: Path, ref: ShardRef, buffers: BufferPool) -> Self:
        """Open the file and verify its head, trailer and identity.

        Raises NotFoundError; CorruptionError if the file is damaged or is not the shard `ref`.
        """
        try:
            fd = open_to_read(path)
        except FileNotFoundError as error:
            raise NotFoundError(f"shard of {ref}: no file {path}") from error
        return cls.of_file(fd, path, ref, buffers)

    @classmethod
    def of_file(cls, fd: int, path: Path, ref: ShardRef, buffers: BufferPool) -> Self:
        """Like `open`, for a file that is open already. The reader closes `fd`, also if this raises.

        `path` is a name for messages.
        """
        try:
            trailer = read_record(fd, path, buffers)
            check_ref(trailer.record, ref)
            return cls(fd, path, trailer, buffers)
        except BaseException:
            os.close(fd)
            raise

    @property
    def record(self) -> ShardRecord:
        return self._trailer.record

    @property
    def table(self) -> ChunkTable:
        return self._trailer.table

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def size_bytes(self) -> int:
        return self.record.file_bytes

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        header = self.record.header
        stop = offset + len(buffer)
        whole = stop == header.payload_bytes or stop % header.chunk_bytes == 0
        if offset % header.chunk_bytes or not whole or stop > header.payload_bytes:
            raise ValueError(
                f"read of [{offset}, {stop}) is not on chunk boundaries ({header.chunk_bytes}) of "
                f"a payload of {header.payload_bytes}"
            )
        for position in range(0, len(buffer), header.chunk_bytes):
            view = buffer[position : position + header.chunk_bytes]
            with read_errors(f"reading shard {self._path}"):
                got = read_at(self._fd, view, self.payload_start + offset + position)
            chunk = (offset + position) // header.chunk_bytes
            if got != len(view) or crc32c(view) != self.table.crcs[chunk]:
                raise CorruptionError(
                    f"shard {self._path}: CRC32C of chunk {chunk} does not match ({got} bytes read)"
                )

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        with read_errors(f"reading shard {self._path}"):
            yield from read_ahead(self._fd, ranges, self._buffers)

    def read_payload(self) -> Generator[memoryview]:
        digester = PayloadDigester(self.record.header)
        with ThreadPoolExecutor(1, "holdfast-node-verify") as thread:
            for view in self._payload():
                digested = thread.submit(digester.update, view)
                try:
                    yield view
                finally:
                    digested.result()
        record, table = digester.finish()
        check_same(record, table, self._trailer)

    def verify(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if read_record(self._fd, self._path, self._buffers) != self._trailer:
            raise CorruptionError(
                f"shard {self._path}: its trailer has changed since it was opened"
            )
        for _ in self.read_payload():
            pass
        end = self.payload_start + self.record.header.payload_bytes
        block = end // BLOCK_BYTES * BLOCK_BYTES
        with read_errors(f"reading shard {self._path}"):
            last = read_small(self._fd, block, align(end) - block, self._buffers)
        expect_zeros(last[end - block :], f"shard {self._path}")

    def _payload(self) -> Iterator[memoryview]:
        """Yield the payload, read ahead and unverified. Raises CorruptionError if the file ends before."""
        stop = self.payload_start + self.record.header.payload_bytes
        span = ByteRange(self.payload_start, stop)
        wanted = tuple(pieces(span, self._buffers))
        for piece, view in zip(wanted, self.read_file(wanted), strict=True):
            if len(view) != piece.length_bytes:
                raise CorruptionError(
                    f"shard {self._path}: ends within its payload, at "
                    f"{piece.start + len(view)} of {span.stop}"
                )
            yield view

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)


Publish = Callable[[TempFile, Trailer], ShardRecord]


class DiskCopyWriter:
    """CopyWriter of the node tier. Not thread-safe.

    One half of `buffer` is filled while the other is digested and written to the temporary file. An
    error of the disk is therefore raised one half later.
    """

    def __init__(
        self,
        ref: ShardRef,
        file_bytes: int,
        temp: TempFile,
        publish: Publish,
        buffer: memoryview,
        cleanup: ExitStack,
    ) -> None:
        """Create a writer.

        Args:
            ref: The shard that the bytes must be.
            file_bytes: Length of the shard file.
            temp: The temporary file, which the writer owns.
            publish: Function that makes the verified file durable under its name.
            buffer: Memory for the two blocks.
            cleanup: Releases the buffer and the reserved bytes. Closed by commit and abort.
        """
        self._ref = ref
        self._file_bytes = file_bytes
        self._temp = temp
        self._publish = publish
        self._cleanup = cleanup
        half = len(buffer) // 2
        self._pipe = BlockPipe(temp.fd, (buffer[:half], buffer[half:]))
        self._block = self._pipe.begin()
        self._filled = 0
        self._flushed = 0
        self._overflow: memoryview | None = None
        self._stream = ShardStream(ref, file_bytes, functools.partial(PipedDigester, self._pipe))
        self._open = True

    @property
    def offset(self) -> int:
        return self._stream.position

    def room(self, length: int) -> memoryview:
        self._expect_open()
        left = len(self._block) - self._filled
        # A piece that exceeds the block is received in a separate buffer and copied.
        self._overflow = None if length <= left else memoryview(bytearray(length))
        if self._overflow is not None:
            return self._overflow
        return self._block[self._filled : self._filled + length]

    def advance(self, length: int) -> None:
        self._expect_open()
        if self._overflow is not None:
            overflow, self._overflow = self._overflow, None
            self.write(overflow[:length])
            return
        with self._aborted_on_error():
            self._take(length)

    def write(self, data: memoryview | bytes) -> None:
        self._expect_open()
        view = memoryview(data).cast("B")
        with self._aborted_on_error():
            while len(view):
                piece = view[: len(self._block) - self._filled]
                self._block[self._filled : self._filled + len(piece)] = piece
                self._take(len(piece))
                view = view[len(piece) :]

    def commit(self) -> ShardRecord:
        self._expect_open()
        try:
            # Write the last bytes while earlier ones are still being digested.
            self._flush()
            with self._disk_errors():
                trailer = self._stream.finish()
                self._pipe.finish()
            return self._publish(self._temp, trailer)
        finally:
            self._close()

    def abort(self) -> None:
        """Remove the temporary file. May be called at any time, also after commit."""
        self._close()

    def _take(self, length: int) -> None:
        """Take over the next `length` bytes of the current block, and write the block if it is full."""
        self._stream.feed(self._block[self._filled : self._filled + length])
        self._filled += length
        # The head is a block of its own, so that each chunk of the payload lies in one block.
        if self._filled == len(self._block) or self._stream.at_payload:
            self._flush()
            with self._disk_errors():
                self._block = self._pipe.begin()

    def _flush(self) -> None:
        size = align(self._filled)
        self._block[self._filled : size] = bytes(size - self._filled)
        self._pipe.write(self._block[:size], self._flushed)
        self._flushed += self._filled
        self._filled = 0

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(f"writing the copy {self._temp.path} of {self._file_bytes} bytes")

    @contextmanager
    def _aborted_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _expect_open(self) -> None:
        if not self._open:
            raise CorruptionError(f"copy of {self._ref}: was aborted or committed before")

    def _close(self) -> None:
        if self._open:
            self._open = False
            try:
                self._pipe.close()  # before the descriptor is closed, because the threads write to it
                self._temp.discard()
            finally:
                self._cleanup.close()
