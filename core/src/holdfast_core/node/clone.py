"""Chunks that two shard files share on the disk, where the file system can do that (reflink).

A clone changes no byte of either file: both are whole, and the file system frees the blocks with the
last file that uses them.
"""

from __future__ import annotations

import fcntl
import itertools
import struct
from collections.abc import Callable

from holdfast_core.format.digest import chunk_digest
from holdfast_core.node.files import is_full, write_at
from holdfast_core.node.shard_file import DiskShardReader

Clone = Callable[[int, int, int, int, int], None]
"""(source, its offset, target, its offset, bytes). Raises OSError; may have cloned a part then."""

_FICLONERANGE = 0x4020940D
_ARGUMENT = struct.Struct("=qQQQ")


def clone_range(source: int, offset: int, target: int, target_offset: int, length: int) -> None:
    """Let `length` bytes of the open file `target` be the same blocks as those of `source`."""
    fcntl.ioctl(target, _FICLONERANGE, _ARGUMENT.pack(source, offset, length, target_offset))


class CloningWriter:
    """Puts blocks of a payload into a shard file that is not preallocated (btrfs keeps what is preallocated
    until all of it is replaced). What an earlier shard has at the same position is
    cloned from its file, the rest is written. Two threads of a BlockPipe call `put`."""

    def __init__(self, earlier: DiskShardReader, payload_start: int, clone: Clone) -> None:
        """`payload_start`: where the payload lies in the file that is written."""
        self._earlier = earlier
        self._payload_start = payload_start
        self._clone = clone
        self.clones = True
        """False once the file system has refused: the rest is written."""

    def put(self, fd: int, data: memoryview, offset: int) -> None:
        """Like write_at. `data` begins with a chunk."""
        chunk_bytes = self._earlier.record.header.chunk_bytes
        position = offset - self._payload_start
        starts = range(0, len(data), chunk_bytes)

        def is_equal(start: int) -> bool:
            digest = self._earlier.table.digest((position + start) // chunk_bytes)
            # Zeros behind the payload make its last chunk another one, unless it ends with a block.
            return self.clones and chunk_digest(data[start : start + chunk_bytes]) == digest

        for equal, group in itertools.groupby(starts, is_equal):
            run = list(group)
            piece = data[run[0] : run[-1] + chunk_bytes]
            if not (equal and self._cloned(fd, len(piece), position + run[0])):
                write_at(fd, piece, offset + run[0])

    def _cloned(self, fd: int, length: int, position: int) -> bool:
        """False where these bytes have to be written."""
        source = self._earlier.payload_start + position
        try:
            self._clone(self._earlier.fd, source, fd, self._payload_start + position, length)
        except OSError as error:
            if is_full(error):
                raise
            self.clones = False
            return False
        return True
