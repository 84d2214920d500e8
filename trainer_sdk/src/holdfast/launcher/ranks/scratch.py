"""A directory in shared memory for the slots of a standalone run. The launcher removes it at its end.

It outlives the ranks, so that a restart in place finds its slots touched and filled. The next launcher
removes the directory of a killed launcher, because its lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "holdfast-run-"
_LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")


class ScratchDirectory:
    """A temporary directory with a lock file, which `open` creates and `close` removes."""

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        self._parent = parent
        self._descriptor: int | None = None
        self.path: Path | None = None

    def open(self) -> Path | None:
        """Create the directory. Return None where the machine has no usable shared memory.

        The slots are then in the folder of the checkpoints.
        """
        if not os.access(self._parent, os.W_OK):
            return None
        sweep(self._parent)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        self._descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = path
        return path

    def close(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sweep(parent: Path) -> None:
    """Remove this user's directories whose launcher has ended."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
