"""Durable file primitives of the node tier. They do not depend on the shard format.

A file is written to a locked temporary file, then fsync, rename, and fsync of the directory.
`read_ahead` reads a file ahead of its consumer.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from holdfast_core.errors import (
    CapacityError,
    HoldfastError,
    TierError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.ids import ByteRange
from holdfast_core.shards.file import BLOCK_BYTES, align

TEMP_PREFIX = ".tmp-"
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.ENOMEM})
MAY_PASS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOLINK})
"""Errors of a disk or a network file system that may fail for a moment."""
_temp_numbers = itertools.count()


def is_full(error: OSError) -> bool:
    return error.errno in _FULL


def disk_error(error: OSError, operation: str) -> HoldfastError:
    """Return the Holdfast error for an OSError. `operation` names the operation and the path."""
    text = f"{operation}: {error.strerror or error}"
    if is_full(error):
        return CapacityError(f"{text} (no room on the volume; needed and available are unknown)")
    if error.errno in _TRANSIENT:
        return UnavailableError(text)
    return TierError(text)


@contextmanager
def disk_errors(operation: str) -> Iterator[None]:
    """Convert an OSError in the context to a Holdfast error. `operation` names the operation and the path."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, operation) from error


@contextmanager
def read_errors(operation: str) -> Iterator[None]:
    """Convert an OSError of reading one file to UnreadableError, except for a missing file.

    Errors that concern the whole process, such as too many open files, become UnavailableError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _TRANSIENT:
            raise disk_error(error, operation) from error
        raise UnreadableError(
            f"{operation}: {error.strerror or error}", may_pass=error.errno in MAY_PASS
        ) from error


def open_to_read(path: Path, *, follows_links: bool = False) -> int:
    """Open a regular file. Raises FileNotFoundError, and UnreadableError for anything else at this name.

    O_NONBLOCK prevents that a FIFO at this name blocks the caller for ever.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with read_errors(f"opening {path}"):
        fd = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UnreadableError(
                    f"opening {path}: expected a regular file, found another kind"
                )
        except BaseException:
            os.close(fd)
            raise
        return fd


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created for it. The lock ends with the process. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class PoisonedError(TierError):
    """fsync or the read-back failed. The contents must be written again, to a new file.

    A second fsync proves nothing: the kernel may have dropped the dirty pages and report success.
    """


def fsync_directory(path: Path) -> None:
    fd = os.open(path, _DIR_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path, mode: int = 0o777) -> None:
    """Create `path` and its missing parents and make their names durable.

    A power cut can remove a directory whose name is not durable, with everything below it.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    with suppress(PermissionError):  # a parent that we may not open was not created by us
        fsync_directory(path.parent)  # the creator of `path` may have died before its fsync
    for directory in reversed(missing):
        directory.mkdir(mode=mode, exist_ok=True)
        fsync_directory(directory.parent)


class DurableDirectories:
    """Creator of directories with durable names. It makes each name durable once per process."""

    def __init__(self, root: Path, mode: int = 0o700) -> None:
        self._root = root
        self._mode = mode
        self._durable: set[Path] = set()
        self.lock = threading.RLock()
        """Held while a file is created in a directory and while empty directories are removed."""

    def ensure(self, path: Path) -> None:
        """Create `path`, the root or a directory below it, and fsync each parent that may have changed."""
        with self.lock:
            if path in self._durable:
                return
            if path == self._root:
                make_directories(path.parent)
            else:
                self.ensure(path.parent)
            try:
                path.mkdir(mode=self._mode)
            except FileNotFoundError as error:
                self._make_again(path.parent, error)
                path.mkdir(mode=self._mode)
            except FileExistsError:
                if stat.S_ISLNK(path.lstat().st_mode) and path != self._root:
                    raise
            fsync_directory(path.parent)
            self._durable.add(path)

    def create(self, path: Path, flags: int) -> int:
        """Open a new file and create its directory if it is missing. Raises OSError."""
        with self.lock:
            self.ensure(path.parent)
            try:
                return os.open(path, flags, 0o600)
            except FileNotFoundError as error:
                self._make_again(path.parent, error)
                return os.open(path, flags, 0o600)

    def _make_again(self, path: Path, error: OSError) -> None:
        """Create a directory again that another program removed.

        Raises `error` for the root: its file system may be unmounted, so it must not be created again.
        """
        if path == self._root:
            raise error
        self._durable.discard(path)
        self.ensure(path)

    def remove_if_empty(self, path: Path) -> None:
        """Remove `path` and its parents below the root, as far as they are empty."""
        with self.lock:
            while path != self._root:
                try:
                    path.rmdir()
                except OSError:
                    return
                self._durable.discard(path)
                path = path.parent


class TempFile:
    """Temporary file in the directory of its final name, locked while its writer lives.

    `remove_dead_temp` of another process tests the lock to find out whether the writer is dead. Process
    ids are not usable for that, because containers have separate ones.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over an open file. Its writer holds the lock of `fd`."""
        self.path = path
        self.fd = fd
        self._directory = path.parent
        self._closed = False

    @classmethod
    def create(cls, directory: Path, directories: DurableDirectories) -> Self:
        """Create and lock a new file in `directory`. Raises OSError."""
        sys.audit("holdfast.node.before_temp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            path = directory / f"{TEMP_PREFIX}{os.getpid()}-{next(_temp_numbers)}"
            try:
                temp = cls(path, directories.create(path, flags))
            except FileExistsError:
                continue  # left by a dead process with the same id; the tier's open() removes it
            try:
                fcntl.flock(temp.fd, fcntl.LOCK_EX)
                if os.fstat(temp.fd).st_nlink == 1:
                    break
            except OSError:
                temp.discard()
                raise
            temp._close()  # a scan removed the file between its open and its lock
        sys.audit("holdfast.node.after_create")
        return temp

    @property
    def size_bytes(self) -> int:
        """Present size of the file: 0 of a new one."""
        return os.fstat(self.fd).st_size

    def preallocate(self, size: int) -> None:
        """Give the file this size and its blocks, so that a full disk fails before any data is written.

        File systems without fallocate allocate no blocks. Raises OSError.
        """
        if self.size_bytes > size:
            os.ftruncate(self.fd, size)
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise

    def use_direct_io(self) -> bool:
        """Switch to O_DIRECT. Return False if the file system does not support it."""
        return set_direct(self.fd, True)

    def sync(self) -> None:
        """Call fsync. Raises PoisonedError, after which the file must not be used."""
        sys.audit("holdfast.node.before_fsync")
        try:
            sys.audit("holdfast.node.fsync")
            os.fsync(self.fd)
        except OSError as error:
            raise PoisonedError(f"fsync of {self.path}: {error.strerror or error}") from error
        sys.audit("holdfast.node.after_fsync")

    def publish(self, final: Path) -> None:
        """Rename the file to `final` in the same directory, and make the name durable."""
        self.path.rename(final)
        sys.audit("holdfast.node.after_rename")
        fsync_directory(self._directory)
        sys.audit("holdfast.node.after_dirsync")
        self._close()

    def publish_if_absent(self, final: Path) -> bool:
        """Like `publish`, but return False and change nothing if `final` exists."""
        try:
            os.link(self.path, final)
        except FileExistsError:
            return False
        sys.audit("holdfast.node.after_rename")
        self.path.unlink()
        fsync_directory(self._directory)
        sys.audit("holdfast.node.after_dirsync")
        self._close()
        return True

    def discard(self) -> None:
        """Remove the file if it was not published. May be called more than once, and after publish.

        A file that cannot be removed stays, unlocked, until the next start. The error is suppressed, so
        that it does not hide the error that led to this call.
        """
        if not self._closed:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)


def remove_dead_temp(path: Path) -> bool:
    """Remove a temporary file whose writer is dead. Return False if the writer lives.

    Raises UnreadableError if it cannot be opened.
    """
    try:
        with read_errors(f"opening the temporary file {path}"):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def set_direct(fd: int, on: bool) -> bool:
    """Switch O_DIRECT on or off. Return False if the file system does not support it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError.

    After a short write that is not aligned, the rest goes through the page cache.
    """
    sys.audit("holdfast.node.write")
    written = 0
    while written < len(data):
        if written % BLOCK_BYTES:
            set_direct(fd, False)
        try:
            count = os.pwrite(fd, data[written:], offset + written)
        except OSError as error:
            if error.errno == errno.EINVAL and _is_direct(fd):
                set_direct(fd, False)
                continue
            raise
        if count == 0:
            raise OSError(errno.EIO, "wrote 0 bytes")
        written += count


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` as far as the file reaches. Return the number of bytes read.

    Raises OSError.
    """
    sys.audit("holdfast.node.read")
    filled = 0
    while filled < len(buffer):
        if filled % BLOCK_BYTES and _is_direct(fd):
            set_direct(fd, False)
        try:
            count = os.preadv(fd, [buffer[filled:]], offset + filled)
        except OSError as error:
            if error.errno == errno.EINVAL and _is_direct(fd):
                set_direct(fd, False)
                continue
            raise
        if count == 0:
            break
        filled += count
    return filled


class BufferPool:
    """Pool of page-aligned buffers. Thread-safe.

    Buffers are kept for reuse, because the first access to new pages costs more than the copy into them.
    At most `keep` unused buffers are kept. `limit_bytes` applies to `take_if_room` only: own writes and
    reads, of which few run at a time, always get a buffer from `take`.
    """

    def __init__(self, size_bytes: int, keep: int, limit_bytes: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        self._keep = keep
        self._free: list[memoryview] = []
        self._in_use = 0
        self._lock = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        """Memory of all buffers, both in use and kept."""
        with self._lock:
            return (self._in_use + len(self._free)) * self.size_bytes

    def take(self) -> AbstractContextManager[memoryview]:
        return self._lend(None)

    def take_if_room(self) -> AbstractContextManager[memoryview]:
        """Like `take`, but raise UnavailableError if `limit_bytes` would be exceeded."""
        return self._lend(self.limit_bytes)

    @contextmanager
    def _lend(self, limit_bytes: int | None) -> Iterator[memoryview]:
        with self._lock:
            if limit_bytes is not None and (self._in_use + 1) * self.size_bytes > limit_bytes:
                raise UnavailableError(
                    f"{self._in_use} buffers of {self.size_bytes} bytes are in use, the limit is "
                    f"{limit_bytes} bytes: too many transfers run at the same time, try again"
                )
            self._in_use += 1
            buffer = self._free.pop() if self._free else None
        try:
            if buffer is None:
                buffer = memoryview(mmap.mmap(-1, self.size_bytes))
            yield buffer
        finally:
            with self._lock:
                self._in_use -= 1
                if buffer is not None and len(self._free) < self._keep:
                    self._free.append(buffer)


_PARTS = 3
"""Parts of a buffer: the caller uses one while two are read. A disk is idle between single reads."""


def read_ahead(fd: int, ranges: Iterable[ByteRange], buffers: BufferPool) -> Iterator[memoryview]:
    """Yield the bytes of each range in order, and read the next two while the caller uses one.

    A view is shorter if the file ends within its range, and it is valid until the next one is requested.
    The reads bypass the page cache where the file system can, as the writes do: a shard is read once.

    Args:
        fd: The file.
        ranges: Byte ranges. Each, extended to whole blocks, is at most a third of a buffer (see
            `pieces`).
        buffers: Pool that one buffer is taken from.

    Raises:
        OSError: The disk failed.
    """
    with ExitStack() as stack:
        buffer = stack.enter_context(buffers.take())
        step = _part_bytes(buffers)
        parts = tuple(buffer[n * step : (n + 1) * step] for n in range(_PARTS))
        direct = stack.enter_context(_direct(fd))
        readers = stack.enter_context(ThreadPoolExecutor(_PARTS - 1, "holdfast-node-read"))
        pending: deque[Future[memoryview]] = deque()
        for number, wanted in enumerate(ranges):
            pending.append(readers.submit(_read, direct, parts[number % _PARTS], wanted))
            if len(pending) == _PARTS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def pieces(span: ByteRange, buffers: BufferPool) -> Iterator[ByteRange]:
    """Cut `span`, which begins on a block boundary, into ranges for `read_ahead`."""
    step = _part_bytes(buffers)
    for start in range(span.start, span.stop, step):
        yield ByteRange(start, min(start + step, span.stop))


def _part_bytes(buffers: BufferPool) -> int:
    return buffers.size_bytes // _PARTS // BLOCK_BYTES * BLOCK_BYTES


@contextmanager
def _direct(fd: int) -> Iterator[int]:
    """Open the same file again with O_DIRECT, because other threads may send from `fd` meanwhile.

    The path under /proc also works for a file that was deleted. A file of another user, whose descriptor
    this process was sent, cannot be opened again; no other thread uses that descriptor.
    """
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        own = os.dup(fd)
    try:
        set_direct(own, True)
        yield own
    finally:
        os.close(own)


def _read(fd: int, buffer: memoryview, wanted: ByteRange) -> memoryview:
    first = wanted.start // BLOCK_BYTES * BLOCK_BYTES
    got = read_at(fd, buffer[: align(wanted.stop) - first], first)
    return buffer[wanted.start - first : min(got, wanted.stop - first)]
