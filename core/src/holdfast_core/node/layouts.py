"""Deletes the layouts of a node tier that no shard and no manifest names any more.

A layout is written before the first shard that names it, so a layout that nothing names may be one that is
about to be used. The processes of a folder do not know each other's saves. Therefore:

1. Every process marks a layout before it stores a shard that names it: it changes the time of the file, whose
   value means nothing, or writes the file.
2. `UnusedLayouts.look` lists the layouts with their marks, and then reads from the disk which layouts the
   shards and manifests name. The tier calls it from time to time while it deletes checkpoints.
3. A layout that is named by none of them at two looks an hour apart, and was not marked in between, is
   deleted.

The lock makes a mark one operation, and the last comparison with the deletion another one. A process that is
killed in between leaves a layout too many, which a later process deletes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from holdfast_core.errors import HoldfastError
from holdfast_core.failpoint import failpoint
from holdfast_core.format.keys import LAYOUTS, layout_key
from holdfast_core.ids import Digest
from holdfast_core.node.files import TEMP_PREFIX, BufferPool, disk_errors
from holdfast_core.node.paths import LOCK_FILE
from holdfast_core.node.scan import layouts_in_use

UNUSED_SECONDS = 3600.0
"""Much longer than a save takes from the mark of its layout until its shard has its name. A commit looks for
the layouts of its shards, so that a save which took longer is not committed."""

_LOOK_EVERY = 16
"""Unused layouts are looked for each time that so many checkpoints were deleted. A state whose structure
changes at each save leaves a layout for each of them."""
_MARK_NS = 2_000_000_000
"""By so much a mark changes the time of a file. File systems keep times in units of up to two seconds (FAT,
Lustre, SMB), and would round a smaller change away: the layout would be deleted although it was marked."""
_Mark = tuple[int, int]
"""Inode and time of a file. Only compared for equality."""
_LOG = logging.getLogger(__name__)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of the layouts of the tier at `root`. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(root / LOCK_FILE, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def mark(path: Path) -> bool:
    """Mark a layout as about to be used. Return False if it does not exist. The caller holds the lock."""
    try:
        found = path.lstat()
        time_ns = found.st_mtime_ns + _MARK_NS
        os.utime(path, ns=(found.st_atime_ns, time_ns), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


class UnusedLayouts:
    """What this process knows about the layouts of a tier that nothing names. Not thread-safe."""

    def __init__(
        self,
        root: Path,
        buffers: BufferPool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an object that has not looked yet.

        Args:
            root: Directory of the tier.
            buffers: Pool of the read buffers.
            monotonic: Returns the seconds since any moment.
        """
        self._root = root
        self._buffers = buffers
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._deleted_checkpoints = 0
        self._seen: dict[Path, tuple[_Mark, float]] = {}
        """The layouts that nothing named at the last look: their marks, and the time of the first look that
        found the layout like this."""

    def checkpoint_deleted(self, known: Set[Digest]) -> int:
        """Look, if it is time, after a checkpoint was deleted. Return the bytes that this freed."""
        with self._lock:
            self._deleted_checkpoints += 1
            if self._deleted_checkpoints % _LOOK_EVERY != 0:
                return 0
            try:
                with disk_errors(f"deleting unused layouts of {self._root}"):
                    return self.look(known)
            except HoldfastError as error:  # it only costs the room of the layouts
                _LOG.warning("unused layouts are kept for now: %s", error)
                return 0

    def look(self, known: Set[Digest]) -> int:
        """Delete the layouts that are unused for long enough. Return the size of their files in bytes.

        Args:
            known: Layouts that are in use. If there are no others, no shard is read.

        Raises:
            CorruptionError, FormatError: A shard or a manifest cannot be read. It may name any layout, so
                that none is deleted.
            OSError: The disk failed.
        """
        before, self._seen, now = self._seen, {}, self._monotonic()
        directory = self._root / LAYOUTS
        paths = [path for path in sorted(directory.iterdir()) if not _is_temporary(path)]
        marks = {path: found for path in paths if (found := _mark_of(path)) is not None}
        for digest in known:
            marks.pop(self._root / layout_key(digest), None)
        if not marks:
            return 0
        for digest in layouts_in_use(self._root, self._buffers):
            marks.pop(self._root / layout_key(digest), None)
        failpoint("node.layouts_scanned")
        freed = 0
        for path, found in marks.items():
            last, since = before.get(path, (None, now))
            if last != found or now - since < UNUSED_SECONDS:
                self._seen[path] = found, since if last == found else now
                continue
            with locked(self._root):
                if _mark_of(path) == found:
                    failpoint("node.before_layout_delete")
                    freed += path.lstat().st_size
                    path.unlink()
        return freed


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMP_PREFIX)


def _mark_of(path: Path) -> _Mark | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None  # another process has deleted or quarantined it
    return found.st_ino, found.st_mtime_ns
