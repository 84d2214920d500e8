"""A file that is locked while it is held: gone, or free, as soon as its process has ended, however.

For what a process says of itself in a place that it shares with others. Whoever finds it free may
remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

logger = logging.getLogger(__name__)


class Claim:
    """Held from when it is made until `release`, or until nobody refers to it any more."""

    def __init__(self, path: Path, *, wait: bool = True) -> None:
        """Raises OSError, also where files cannot be locked; BlockingIOError, unless `wait`, where
        somebody holds it."""
        self._path = path
        self._descriptor: int | None = _locked(path, wait=wait)
        _held.add(self)

    @property
    def name(self) -> str:
        return self._path.name

    def release(self) -> None:
        """Remove the file, and its directory if nothing else is in it. A file that another process has made
        under this name since stays."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the folder may be gone, and the lock ends anyhow
                if self.is_in_place():
                    self._path.unlink(missing_ok=True)
                    self._path.parent.rmdir()
            self.forget()

    def is_in_place(self) -> bool:
        """Whether the file that is held is still the one of this name."""
        if self._descriptor is None:
            return False
        try:
            return self._path.stat().st_ino == os.fstat(self._descriptor).st_ino
        except OSError:
            return False

    def forget(self) -> None:
        """Not held by this process; the file stays."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            with contextlib.suppress(OSError):
                self.release()


_held: weakref.WeakSet[Claim] = weakref.WeakSet()


def _forget_all() -> None:
    for claim in tuple(_held):
        claim.forget()


# A data loader's worker outlives a killed trainer by seconds, and a lock lives as long as the last
# process that has its descriptor.
os.register_at_fork(after_in_child=_forget_all)


def claim(path: Path) -> Claim | None:
    """None where that cannot be: nobody sees then that this process is there."""
    try:
        return Claim(path)
    except OSError as error:
        logger.info("%s: %s; other processes do not see this one", path, error)
        return None


def holder(path: Path) -> str | None:
    """What the process that holds the file says of itself; None where no process holds it."""
    if not is_held(path):
        return None
    try:
        return path.read_text() or "another process"
    except (OSError, ValueError):
        return "another process"


def is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def remove_if_free(path: Path) -> bool:
    """False where somebody holds it, or where nobody can tell. Removed under the lock, so that it is
    not another's by then."""
    try:
        Claim(path, wait=False).release()
    except OSError:
        return False
    return True


def _locked(path: Path, *, wait: bool) -> int:
    operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            path.parent.mkdir(parents=True)
        except FileExistsError:
            if not path.parent.is_dir() and path.parent.exists():
                raise
        try:
            descriptor = os.open(path, flags, 0o660)
        except FileNotFoundError:
            continue  # somebody else left, and took the directory away
        try:
            fcntl.flock(descriptor, operation)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:  # of no use without a lock
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was free for a moment, and somebody removed it
