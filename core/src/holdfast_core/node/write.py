"""Write shards, and copies of other pods' shards, to new files or to spare ones.

A shard file is preallocated, written, synced and read back, and then gets its name (docs/guarantees.md R1).
A copy is verified while it is received.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from holdfast_core.errors import AlreadyExistsError, CapacityError, CorruptionError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Rank, ShardRef
from holdfast_core.node.files import BufferPool, PoisonedError, TempFile, disk_errors
from holdfast_core.node.scan import shard_path
from holdfast_core.node.shard_file import (
    READ_BACK_EVERY,
    BlockPipe,
    PipedDigester,
    read_back,
    to_read_back,
    write_payload,
)
from holdfast_core.node.volume import IndexEntry, NodeIndex, UnreadableShards, Volume
from holdfast_core.shards.file import (
    ShardHeader,
    ShardRecord,
    Trailer,
    align,
    chunk_count,
    file_bytes,
)
from holdfast_core.shards.stream import PayloadDigester, ShardStream
from holdfast_core.tiers.base import PayloadSource

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


_WRITE_ATTEMPTS = 2
_WRITE_LOCKS = 64
_LOG = logging.getLogger(__name__)


class ShardWrites:
    """The writes of one node tier. Thread-safe."""

    def __init__(
        self, volume: Volume, index: NodeIndex, buffers: BufferPool, unreadable: UnreadableShards
    ) -> None:
        self._volume = volume
        self._index = index
        self._buffers = buffers
        self._unreadable = unreadable
        self._lock = threading.Lock()
        self._write_locks = tuple(threading.Lock() for _ in range(_WRITE_LOCKS))
        self._chunks_copied = 0
        self._written: dict[Rank, int] = {}
        """Number of shards that this process has written for each rank."""

    def write(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """See NodeTier.write_shard."""
        # Two writers of one identity run one after the other; the second finds the first one's shard.
        with self._write_locks[header.rank % _WRITE_LOCKS]:
            existing = self._existing(header, source)
            if existing is not None:
                return existing
            return self._twice(header, source)

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> DiskCopyWriter:
        """See NodeTier."""
        directory, volume = shard_path(self._volume.root, ref).parent, self._volume
        what = f"copy of rank {ref.rank} step {ref.step}"
        with ExitStack() as stack:
            spare = volume.take_spare(directory, file_bytes, stack)
            new_bytes = _new_bytes(file_bytes, spare)
            stack.enter_context(volume.reserve(file_bytes, what, new_bytes))
            with disk_errors(f"creating the {what} in {directory}"):
                temp = spare or TempFile.create(directory, volume.directories)
                stack.callback(temp.discard)
                temp.preallocate(file_bytes)
                temp.use_direct_io()
            buffer = stack.enter_context(self._buffers.take_if_room())
            return DiskCopyWriter(
                ref, file_bytes, temp, self._publish_copy, buffer, stack.pop_all()
            )

    def _existing(self, header: ShardHeader, source: PayloadSource) -> ShardRecord | None:
        """Return the record of an earlier write of the same shard, or None.

        The source is digested and compared, not written again. Raises AlreadyExistsError if the tier
        holds only other payloads with this identity.
        """
        entries = self._index.same_identity(header)
        if not entries:
            return None
        digester = PayloadDigester(header)
        with self._buffers.take() as buffer:
            for offset in range(0, header.payload_bytes, len(buffer)):
                view = buffer[: min(len(buffer), header.payload_bytes - offset)]
                source.read_into(offset, view)
                digester.update(view)
        record, _ = digester.finish()
        for entry in entries:
            if entry.record == record:
                return record
        raise AlreadyExistsError(
            f"shard of rank {header.rank} step {header.step} round {header.round}: the tier has "
            f"payload {entries[0].record.blake3}, refused to write another payload {record.blake3}"
        )

    def _twice(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """Write a shard. The second attempt writes all of it to a new file."""
        size, what = file_bytes(header), f"shard of rank {header.rank} step {header.step}"
        directory, volume = _directory(self._volume.root, header), self._volume
        for attempt in range(_WRITE_ATTEMPTS):
            with ExitStack() as stack:
                spare = volume.take_spare(directory, size, stack) if attempt == 0 else None
                stack.enter_context(volume.reserve(size, what, _new_bytes(size, spare)))
                try:
                    with disk_errors(f"writing the {what}"):
                        temp = spare or TempFile.create(directory, volume.directories)
                        stack.callback(temp.discard)
                        return self._once(temp, header, source)
                except PoisonedError as error:
                    if attempt + 1 == _WRITE_ATTEMPTS:
                        raise
                    _LOG.warning("%s: writing the whole shard again, to a new file", error)
                except CapacityError as error:
                    # The budget does not cover quotas and files of other programs.
                    if attempt + 1 < _WRITE_ATTEMPTS and volume.make_room():
                        continue
                    raise CapacityError(
                        f"{error}: needed {size} bytes, {volume.budget.free_bytes()} available"
                    ) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _once(self, temp: TempFile, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        written = self._written.get(header.rank, 0)
        temp.preallocate(file_bytes(header))
        temp.use_direct_io()
        record, table = write_payload(temp.fd, header, source, self._buffers)
        temp.sync()
        chunks = to_read_back(written, chunk_count(header))
        read_back(temp.fd, record, table, chunks, self._buffers, source.verified)
        self._publish(temp, record)
        self._written[header.rank] = written + 1
        return record

    def _publish_copy(self, temp: TempFile, trailer: Trailer) -> ShardRecord:
        record = trailer.record
        with disk_errors(f"committing the copy of {record.ref}"):
            temp.sync()
            with self._lock:
                start = -self._chunks_copied % READ_BACK_EVERY
                self._chunks_copied += len(trailer.table)
            chunks = range(start, len(trailer.table), READ_BACK_EVERY)
            read_back(temp.fd, record, trailer.table, chunks, self._buffers)
            self._publish(temp, record)
        return record

    def _publish(self, temp: TempFile, record: ShardRecord) -> None:
        path, volume = shard_path(self._volume.root, record.ref), self._volume
        if path.is_dir():  # a rename replaces any file, but no directory
            volume.quarantine(path, f"{path}: expected a file, found a directory")
        temp.publish(path)
        self._unreadable.forget(record.ref)
        if self._index.add(IndexEntry(record, path)):
            volume.budget.add(record.file_bytes)


def _directory(root: Path, header: ShardHeader) -> Path:
    any_digest = digest_of(b"")
    ref = ShardRef(header.job_uid, header.step, header.round, header.rank, any_digest)
    return shard_path(root, ref).parent


def _new_bytes(size: int, spare: TempFile | None) -> int:
    """Return the bytes that a file of `size` takes from the file system beyond those of the spare file."""
    return size if spare is None else max(0, size - spare.size_bytes)
