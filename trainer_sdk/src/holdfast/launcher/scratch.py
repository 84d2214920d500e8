"""A directory in shared memory for the slots of a standalone run, removed with the launcher.

It outlives the ranks, so that a restart in place finds its slots touched and filled. A launcher that
was killed leaves its directory behind; the next one sees by the lock that nobody owns it.
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
    """Created by `open`, removed by `close`; held by a file lock in between."""

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        self._parent = parent
        self._descriptor: int | None = None
        self.path: Path | None = None

    def open(self) -> Path | None:
        """None where the machine has no usable shared memory: slots then lie beside the shards."""
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
    """Remove own directories whose launcher is dead. Another user's are left alone."""
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
