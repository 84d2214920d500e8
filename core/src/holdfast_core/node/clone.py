"""Chunks whose disk blocks two shard files share, on file systems with reflinks (ADR 0051).

A clone changes no byte of either file. The file system frees a block when the last file that uses it
is deleted.
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
"""Function (source fd, source offset, target fd, target offset, length in bytes).

It raises OSError; a part of the range may have been cloned then.
"""

_FICLONERANGE = 0x4020940D
_ARGUMENT = struct.Struct("=qQQQ")


def clone_range(source: int, offset: int, target: int, target_offset: int, length: int) -> None:
    """Make `length` bytes of the file `target` share the blocks of the file `source`. Raises OSError."""
    fcntl.ioctl(target, _FICLONERANGE, _ARGUMENT.pack(source, offset, length, target_offset))


class CloningWriter:
    """Writer that clones the chunks which an earlier shard has at the same position, and writes the rest.

    The target file must not be preallocated: btrfs keeps preallocated blocks until all of them are
    replaced. The two write threads of a BlockPipe call `put`.
    """

    def __init__(self, earlier: DiskShardReader, payload_start: int, clone: Clone) -> None:
        """Create a writer. `payload_start` is the payload's offset in the file that is written."""
        self._earlier = earlier
        self._payload_start = payload_start
        self._clone = clone
        self.clones = True
        """False after the file system has refused a clone. All further chunks are written."""

    def put(self, fd: int, data: memoryview, offset: int) -> None:
        """Clone or write all of `data` at `offset`, like `write_at`. `data` begins on a chunk boundary."""
        chunk_bytes = self._earlier.record.header.chunk_bytes
        position = offset - self._payload_start
        starts = range(0, len(data), chunk_bytes)

        def is_equal(start: int) -> bool:
            digest = self._earlier.table.digest((position + start) // chunk_bytes)
            # `data` includes the padding of a last block, so a padded last chunk never matches.
            return self.clones and chunk_digest(data[start : start + chunk_bytes]) == digest

        for equal, group in itertools.groupby(starts, is_equal):
            run = list(group)
            piece = data[run[0] : run[-1] + chunk_bytes]
            if not (equal and self._cloned(fd, len(piece), position + run[0])):
                write_at(fd, piece, offset + run[0])

    def _cloned(self, fd: int, length: int, position: int) -> bool:
        """Clone a run. Return False if the bytes must be written; raise OSError if the disk is full."""
        source = self._earlier.payload_start + position
        try:
            self._clone(self._earlier.fd, source, fd, self._payload_start + position, length)
        except OSError as error:
            if is_full(error):
                raise
            self.clones = False
            return False
        return True
