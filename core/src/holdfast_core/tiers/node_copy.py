"""A peer's or the store's copy of a shard on its way to the node's disk, verified as it comes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from holdfast_core.errors import CorruptionError
from holdfast_core.format.record import ShardRecord
from holdfast_core.format.shard import Trailer, align
from holdfast_core.format.stream import ShardStream
from holdfast_core.ids import ShardRef
from holdfast_core.tiers.disk import TempFile, disk_errors, write_at

Publish = Callable[[TempFile, Trailer], ShardRecord]


class DiskCopyWriter:
    """CopyWriter of the node tier: one block in memory, the rest in a temporary file.

    Not thread-safe. `cleanup` gives the reserved bytes back and is run by commit and abort.
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
        self._ref = ref
        self._file_bytes = file_bytes
        self._temp = temp
        self._publish = publish
        self._cleanup = cleanup
        self._buffer = buffer
        self._filled = 0
        self._flushed = 0
        self._stream = ShardStream(ref, file_bytes)
        self._open = True

    @property
    def offset(self) -> int:
        return self._stream.position

    def write(self, data: memoryview | bytes) -> None:
        """Raises CorruptionError as soon as the bytes cannot be the shard; the copy is gone."""
        self._expect_open()
        view = memoryview(data).cast("B")
        try:
            self._stream.feed(view)
            while len(view):
                room = len(self._buffer) - self._filled
                piece = view[:room]
                self._buffer[self._filled : self._filled + len(piece)] = piece
                self._filled += len(piece)
                view = view[len(piece) :]
                if self._filled == len(self._buffer):
                    self._flush()
        except BaseException:
            self.abort()
            raise

    def commit(self) -> ShardRecord:
        self._expect_open()
        try:
            trailer = self._stream.finish()
            self._flush()
            return self._publish(self._temp, trailer)
        finally:
            self._close()

    def abort(self) -> None:
        """Leave nothing behind. May be called at any time, also after commit."""
        self._close()

    def _flush(self) -> None:
        size = align(self._filled)
        self._buffer[self._filled : size] = bytes(size - self._filled)
        with disk_errors(f"writing the copy {self._temp.path} of {self._file_bytes} bytes"):
            write_at(self._temp.fd, self._buffer[:size], self._flushed)
        self._flushed += self._filled
        self._filled = 0

    def _expect_open(self) -> None:
        if not self._open:
            raise CorruptionError(f"copy of {self._ref}: was aborted or committed before")

    def _close(self) -> None:
        if self._open:
            self._open = False
            try:
                self._temp.discard()
            finally:
                self._cleanup.close()
