"""Lock files (claims) by which a process shows others in a shared directory that it is alive.

The lock is free as soon as its process has ended, however it ended. Any process that finds the lock free
may remove the file. The file contains the process's id and host name.
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
    """A locked file. It is held until `release`, or until the object is garbage-collected."""

    def __init__(self, path: Path, *, wait: bool = True) -> None:
        """Create and lock the file.

        Raises OSError, also where the file system has no locks. Raises BlockingIOError if another process
        holds the lock and `wait` is False.
        """
        self._path = path
        self._descriptor: int | None = _locked(path, wait=wait)
        _held.add(self)

    @property
    def name(self) -> str:
        return self._path.name

    def release(self) -> None:
        """Remove the file and release the lock. Also remove the directory if it is empty then.

        A file that another process has created under this name in the meantime is not removed.
        """
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the folder may be gone; `forget` releases the lock
                if self.is_in_place():
                    self._path.unlink(missing_ok=True)
                    self._path.parent.rmdir()
            self.forget()

    def is_in_place(self) -> bool:
        """Return whether the path still names the file that this claim holds."""
        if self._descriptor is None:
            return False
        try:
            return self._path.stat().st_ino == os.fstat(self._descriptor).st_ino
        except OSError:
            return False

    def forget(self) -> None:
        """Close this process's descriptor without removing the file."""
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


# A lock is held until the last process that has its descriptor has closed it, and a data loader's worker
# outlives a killed trainer by seconds.
os.register_at_fork(after_in_child=_forget_all)


def claim(path: Path) -> Claim | None:
    """Return a claim of `path`, or None where that fails. Other processes do not see this one then."""
    try:
        return Claim(path)
    except OSError as error:
        logger.info("%s: %s. Other processes cannot detect this one", path, error)
        return None


def holder(path: Path) -> str | None:
    """Return the description of the process that holds the file, or None where no process holds it."""
    if not is_held(path):
        return None
    try:
        return path.read_text() or "another process"
    except (OSError, ValueError):
        return "another process"


def is_held(path: Path) -> bool:
    """Return whether a process holds the file. Return False where that cannot be determined."""
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
    """Remove the file if no process holds it. Return False otherwise, or where locks do not work.

    The lock is held during the removal, so that no other process can acquire it in between.
    """
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
            continue  # another process released its claim and removed the empty directory
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
        except OSError:  # the file must not stay where it cannot be locked or written
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process removed the file before this one had locked it
