"""Which processes use a directory: its writers, for which a new run waits, and its readers.

A process shows that it is alive by a claim, a lock file. The lock is free as soon as its process has ended,
however it ended. Any process that finds the lock free may remove the file. The file contains the process's
id and host name. Each process of a training holds a claim while it lives:

 1. A trainer acquires DIR/processes/<name>.trainer before it starts its persister.
 2. The persister holds <name>.writer until all that was staged is durable.
 3. A run that starts waits for each writer whose trainer has ended. If it chose a checkpoint earlier, it
    would repeat the steps that are being written.

It does not wait for a writer whose trainer lives, because that process may only read the same folder. Where
the file system has no locks, no run waits.

Only one run trains in a folder, the one whose rank 0 holds DIR/training.lock. Other runs may restore from it.

A reader of a checkpoint holds a claim under DIR/readers/<checkpoint>.<process>, so that pruning skips the
checkpoint. A save into a full folder may delete it all the same. Where the folder cannot be written or has
no locks, readers are not visible.

A process also detects that its folder was deleted or unmounted since it was opened. A deleted folder is
created again, because each checkpoint is complete by itself. A folder whose file system was unmounted must
not be created again: the checkpoints would fill the disk below the mount point and would be hidden when the
file system is mounted again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.directory.choice import checkpoint_of_name
from holdfast_core.errors import ConfigError, TierError
from holdfast_core.ids import CheckpointId

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
        except FileExistsError as error:
            # A symbolic link whose target is away would be tried for ever.
            if os.path.lexists(error.filename) and not Path(error.filename).is_dir():
                raise
        try:
            descriptor = os.open(path, flags, 0o660)
        except FileNotFoundError:
            continue  # another process released its claim and removed the empty directory
        try:
            fcntl.flock(descriptor, operation)
            # A full disk may have no room for the text, but only the lock counts.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            # An empty file must not stay where it cannot be locked. A holder has written its name.
            if not os.fstat(descriptor).st_size:
                path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process removed the file before this one had locked it


_READERS = "readers"
_POLL_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 600.0
"""Longest wait of a start. A shard may have some hundred GiB, and a write to a hanging disk never ends."""


@dataclass(frozen=True, slots=True)
class Process:
    """Names of the claims of one trainer and its persister."""

    directory: Path
    name: str

    @property
    def trainer(self) -> Path:
        return self.directory / f"{self.name}.trainer"

    @property
    def writer(self) -> Path:
        return self.directory / f"{self.name}.writer"


def wait_for_writers(directory: Path, longest_seconds: float = _LONGEST_WAIT_SECONDS) -> None:
    """Wait until no persister writes for a trainer that has ended, at most `longest_seconds`."""
    deadline = time.monotonic() + longest_seconds
    names: set[str] = set()
    with contextlib.suppress(OSError):  # the directory does not exist yet, or has just been removed
        names = {path.stem for path in directory.iterdir()}
    for name in sorted(names):
        process = Process(directory, name)
        if is_held(process.trainer):
            continue
        if is_held(process.writer):
            _wait(process.writer, deadline)
        if remove_if_free(process.writer):
            remove_if_free(process.trainer)


def has_writers(directory: Path) -> bool:
    """Return whether a persister writes, as far as that can be determined."""
    return any(is_held(path) for path in directory.glob("*.writer"))


def claim_checkpoint(root: Path, checkpoint: CheckpointId) -> Claim | None:
    """Record that this process reads `checkpoint`, until the claim is released or the process ends.

    Return None where the folder cannot be written or has no locks.
    """
    name = f"{checkpoint}.{os.getpid()}-{secrets.token_hex(4)}"
    return claim(root / _READERS / name) if os.access(root, os.W_OK) else None


def claimed_checkpoints(root: Path) -> frozenset[CheckpointId]:
    """Return the checkpoints that any process reads, this one included."""
    found: set[CheckpointId] = set()
    with contextlib.suppress(OSError):  # there is no such directory
        for path in (root / _READERS).iterdir():
            checkpoint = checkpoint_of_name(path.name.partition(".")[0])
            if checkpoint is None:
                continue
            if is_held(path):
                found.add(checkpoint)
            else:
                remove_if_free(path)
    return frozenset(found)


def _wait(writer: Path, deadline: float) -> None:
    whose = ""
    with contextlib.suppress(OSError):
        whose = writer.read_text()
    logger.warning("waiting for %s, which still writes the saves of a run that has ended", whose)
    while is_held(writer):
        if time.monotonic() >= deadline:
            logger.warning(
                "%s still writes: starting from the newest committed checkpoint; the saves that "
                "it still writes may be lost",
                whose,
            )
            return
        time.sleep(_POLL_SECONDS)


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


_ENDING_SECONDS = 10.0
"""Time that a killed process may take to end. It takes long where much memory must be freed."""


class TrainingLock:
    """DIR/training.lock, which rank 0 holds from its first save until its process ends at the latest.

    Where the file system has no locks, it is logged, and the run continues without one.

    Args:
        root: The folder.
        expect_nothing_newer: Raises ConfigError if another run has saved since this run chose its restore
            point. This run would continue from an older step, and its later round would hide the
            checkpoints of the other run.
    """

    def __init__(self, root: Path, expect_nothing_newer: Callable[[], None]) -> None:
        self._root = root
        self._path = root / "training.lock"
        self._expect_nothing_newer = expect_nothing_newer
        self._held: Claim | None = None
        self._keeping = threading.Lock()
        """Serializes `keep`: the training thread and the link's thread call it."""

    def other_holder(self) -> str | None:
        """Return a description of the other run's process that holds the lock, or None."""
        return None if self._held is not None else holder(self._path)

    def take(self) -> None:
        """Acquire the lock. This waits up to 10 seconds for a process that is ending.

        Raises ConfigError where another run holds the lock, or has saved.
        """
        deadline = time.monotonic() + _ENDING_SECONDS
        while self._held is None:
            try:
                if not self._acquire():
                    return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._in_use() from None
                time.sleep(_POLL_SECONDS)

    def keep(self) -> None:
        """Acquire the lock again if its file was removed, alone or with the folder. This does not wait.

        Raises ConfigError where another run has acquired the lock since, or has saved.
        """
        with self._keeping:
            if self._held is None or self._held.is_in_place():
                return
            try:
                self._acquire()
            except BlockingIOError:
                raise self._in_use() from None

    def release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _acquire(self) -> bool:
        """Acquire the lock instead of the one that is held. Return False where there are no locks.

        Raises BlockingIOError, ConfigError.
        """
        try:
            lock = Claim(self._path, wait=False)
        except BlockingIOError:
            raise
        except OSError as error:
            logger.info(
                "%s: %s. Other runs cannot detect that this run uses the folder", self._path, error
            )
            return False
        try:
            self._expect_nothing_newer()
        except ConfigError:
            lock.release()
            raise
        if self._held is not None:
            self._held.forget()
        self._held = lock
        return True

    def _in_use(self) -> ConfigError:
        whose = holder(self._path) or "another process"
        return ConfigError(
            f"{self._root} is in use: {whose} trains in it, and one run at a time may save in a "
            "folder. Wait for its end, end it, or choose another folder"
        )
