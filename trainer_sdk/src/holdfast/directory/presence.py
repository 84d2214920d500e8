"""Detects that a folder was deleted or unmounted since it was opened.

A deleted folder is created again, because each checkpoint is complete by itself. A folder whose file
system was unmounted must not be created again: the checkpoints would fill the disk below the mount point
and would be hidden when the file system is mounted again.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import TierError

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.ENODEV})


def device_of(path: Path) -> int:
    """Return the device number of `path`, or of its nearest parent that exists."""
    while True:
        try:
            return path.stat().st_dev
        except FileNotFoundError:
            path = path.parent


def expect_not_unmounted(root: Path, device: int | None) -> None:
    """Raise TierError if `root` is no longer on the file system `device`.

    Call it where a process opens its run's folder again and finds the folder empty.
    """
    if device is not None and device_of(root) != device:
        raise TierError(
            f"{root}: the file system on which this run opened the folder is no longer mounted "
            "there; mount it again, and saves continue"
        )


@dataclass(frozen=True, slots=True)
class Presence:
    """Identity of a directory when this object was made."""

    path: Path
    identity: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> Presence:
        """Record the identity of `path`. Raises OSError."""
        return cls(path, _identity(path))

    def is_lost(self) -> bool:
        """Return whether the directory was removed, replaced or unmounted."""
        try:
            return _identity(self.path) != self.identity
        except OSError as error:
            return error.errno in _GONE


def is_directory_gone(error: BaseException) -> bool:
    """Return whether a write failed because the folder, or a directory in it, does not exist."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _GONE:
            return True
        cause = cause.__cause__
    return False


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
