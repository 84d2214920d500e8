"""Writer of a shard that is received from a peer or the store, verified while it is received."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from holdfast_core.errors import CorruptionError
from holdfast_core.ids import ShardRef
from holdfast_core.node.blocks import BlockPipe, PipedDigester
from holdfast_core.node.files import TempFile, disk_errors
from holdfast_core.shards.file import Trailer, align
from holdfast_core.shards.record import ShardRecord
from holdfast_core.shards.stream import ShardStream

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
