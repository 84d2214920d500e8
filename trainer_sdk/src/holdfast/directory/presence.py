"""Whether a folder is still the one that was opened, or was deleted or unmounted since.

A folder that was deleted is made again, because each checkpoint is complete by itself. One whose file
system was unmounted must not be: the checkpoints would fill the disk below, and be hidden when the file
system comes back.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import TierError

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN, errno.ENODEV})


def device_of(path: Path) -> int:
    """Of the file system of `path`, or of its nearest parent that is there."""
    while True:
        try:
            return path.stat().st_dev
        except FileNotFoundError:
            path = path.parent


def expect_not_unmounted(root: Path, device: int | None) -> None:
    """For a process that opens again what its run has opened on `device`, and finds nothing in it. Raises
    TierError."""
    if device is not None and device_of(root) != device:
        raise TierError(
            f"{root}: the file system on which this run opened the folder is not mounted there any more; "
            "mount it again, and saves go on"
        )


@dataclass(frozen=True, slots=True)
class Presence:
    """Of one directory, as it was when it was made."""

    path: Path
    identity: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> Presence:
        """Raises OSError."""
        return cls(path, _identity(path))

    def is_lost(self) -> bool:
        try:
            return _identity(self.path) != self.identity
        except OSError as error:
            return error.errno in _GONE


def says_gone(error: BaseException) -> bool:
    """Whether the reason of a failed write is that a directory below the folder is not there."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _GONE:
            return True
        cause = cause.__cause__
    return False


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
