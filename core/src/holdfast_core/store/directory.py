"""The object store in a directory: on a shared file system, or on a local disk (`make demo`).

An object is a file whose path is its key. A file is complete and has been read back before it gets its
name. put-if-absent is link(2), which fails if the name exists. `StoreConfig.endpoint` names the directory
as `file:///path`.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    CutError,
    NotFoundError,
    TierError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.format.canonical import append_crc, crc32c
from holdfast_core.node.files import (
    MAY_PASS,
    TEMP_PREFIX,
    DurableDirectories,
    TempFile,
    disk_error,
    fsync_directory,
    open_to_read,
    read_at,
    read_errors,
    write_at,
)
from holdfast_core.tiers.objects import (
    MAX_DOCUMENT_BYTES,
    Listed,
    ObjectInfo,
    ObjectSource,
    Page,
    Part,
    info_of,
)

SCHEME = "file://"
PART_BYTES = 8 << 20
_SLICE_BYTES = 4 << 20
_BAD = ".bad"
_MAX_UNFINISHED = 1000
_LOG = logging.getLogger(__name__)


def directory_of(endpoint: str) -> Path | None:
    """Return the directory that an endpoint names, or None if the endpoint is a server."""
    return Path(endpoint.removeprefix(SCHEME)) if endpoint.startswith(SCHEME) else None


class DirectoryObjectStore:
    """Implementation of tiers.objects.ObjectStore. Safe for many threads and processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directories = DurableDirectories(root, 0o777)

    @property
    def name(self) -> str:
        return str(self._root)

    def close(self) -> None:
        """Do nothing: no file stays open between two calls."""

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        """See ObjectStore.write. A file that is replaced is kept as `<name>.bad`."""
        path = self._root / key
        parts: Iterable[Part] = source.parts(PART_BYTES)
        expected = None
        if not source.made_while_sent:
            expected, parts = info_of(parts), source.parts(PART_BYTES)
        with _store_errors(f"write of {path}"):
            if not replace and self._is_stored(path, expected):
                return
            temp = self._temporary(path)
            try:
                written = _write(temp.fd, parts)
                if _read_back(temp.path) != written:
                    source.verify()
                    raise UnavailableError(
                        f"{temp.path}: the bytes that were read back differ from those that were written"
                    )
                if replace:
                    self._replace(temp, path)
                elif not temp.publish_if_absent(path) and not self._is_stored(path, written):
                    raise UnavailableError(
                        f"{path}: another process created and removed the file during the write"
                    )
            finally:
                temp.discard()

    def _is_stored(self, path: Path, expected: ObjectInfo | None) -> bool:
        """Return True if the file has exactly these bytes, durably, and False if there is no file.

        Raises AlreadyExistsError if the file has other bytes, or any if `expected` is None.
        """
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return False
        try:
            same = expected is not None and size == expected.size_bytes and _info(path) == expected
        except NotFoundError:
            return False  # it was deleted since the look at its size
        if not same:
            wanted = "no file" if expected is None else f"a file of {expected.size_bytes} bytes"
            raise AlreadyExistsError(f"{path}: expected {wanted}, found other {size} bytes")
        # The process that wrote the file may have died before it made the name durable.
        self._directories.ensure(path.parent)
        fsync_directory(path.parent)
        return True

    def _temporary(self, path: Path) -> TempFile:
        """Create a temporary file beside `path`.

        The name is random: processes in different containers may have the same id. The file has no lock,
        which some shared file systems do not support. `abort_stale` removes it by its age.
        """
        temp = path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return TempFile(temp, self._directories.create(temp, flags))

    def _replace(self, temp: TempFile, path: Path) -> None:
        """Replace a damaged file atomically, so that the name exists at every moment."""
        bad = Path(f"{path}{_BAD}")
        bad.unlink(missing_ok=True)
        with suppress(FileNotFoundError, FileExistsError):  # another process may do the same
            os.link(path, bad)
        temp.publish(path)
        _LOG.warning("%s was damaged: replaced it, and kept the damaged file as %s", path, bad)

    def get(self, key: str) -> bytes:
        path = self._root / key
        with read_errors(f"read of {path}"), _open(path) as fd:
            data = bytearray()
            while piece := os.read(fd, _SLICE_BYTES):
                data += piece
                if len(data) > MAX_DOCUMENT_BYTES:
                    raise CorruptionError(f"{path}: more than {MAX_DOCUMENT_BYTES} bytes")
            return bytes(data)

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        path = self._root / key
        with read_errors(f"read of {path}"), _open(path) as fd:
            filled = read_at(fd, buffer, start)
        if filled < len(buffer):
            raise CutError(f"{path}: ends at byte {start + filled}, expected {start + len(buffer)}")

    def size(self, key: str, *, sure: bool = False) -> int | None:
        path = self._root / key
        with _store_errors(f"look for {path}"):
            try:
                return path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        """See ObjectStore.list. All objects are on one page."""
        with _store_errors(f"list of {self._root / prefix}"):
            below = self._folders(prefix) if folders else ()
            found = self._listed(
                file
                for file in self._files(prefix, deep=not folders)
                if not file[0].endswith(_BAD) and not _is_temporary(file[0])
            )
        return Page(tuple(found), folders=below)

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        """See ObjectStore.unfinished."""
        with _store_errors(f"list of temporary files below {self._root / prefix}"):
            files = (file for file in self._files(prefix) if _is_temporary(file[0]))
            return self._listed(itertools.islice(files, _MAX_UNFINISHED))

    def _listed(self, files: Iterable[tuple[str, float, int]]) -> Sequence[Listed]:
        found = sorted(files)
        now = self._now(mtime for _, mtime, _ in found)
        return [Listed(key, _age(now, mtime), size) for key, mtime, size in found]

    def delete(self, keys: Sequence[str]) -> None:
        with _store_errors(f"delete in {self._root}"):
            paths = [self._root / key for key in keys]
            for path in paths:
                # A listing does not show the damaged file, so it must not outlive the object.
                Path(f"{path}{_BAD}").unlink(missing_ok=True)
                if path.is_dir():
                    path.rename(f"{path}{_BAD}")  # no object, and nobody expects a directory here
                else:
                    path.unlink(missing_ok=True)
            for directory in {path.parent for path in paths}:
                with suppress(FileNotFoundError):
                    fsync_directory(directory)

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        """Remove the temporary files of writers that were killed."""
        removed = 0
        for prefix in prefixes:
            with _store_errors(f"removal of temporary files below {self._root / prefix}"):
                for file in self._listed(f for f in self._files(prefix) if _is_temporary(f[0])):
                    if file.age >= older_than:
                        (self._root / file.key).unlink(missing_ok=True)
                        removed += 1
        return removed

    def _folders(self, prefix: str) -> tuple[str, ...]:
        """Return the directories below a prefix that are not empty. Deletions leave empty ones.

        Those that this process cannot read are left out: the root of a volume has `lost+found`.
        """
        found = list[str]()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / prefix) as it:
            for entry in it:
                if entry.is_dir(follow_symlinks=False):
                    unreadable = suppress(FileNotFoundError, PermissionError)
                    with unreadable, os.scandir(entry.path) as inside:
                        if next(inside, None) is not None:
                            found.append(f"{prefix}{entry.name}/")
        return tuple(sorted(found))

    def _files(self, prefix: str, *, deep: bool = True) -> Iterator[tuple[str, float, int]]:
        """Yield key, modification time and length of each file whose key begins with `prefix`.

        Without `deep`, files in directories below the prefix are left out.
        """
        parent, _, begin = prefix.rpartition("/")
        top = str(self._root / parent)
        for folder, below, names in os.walk(top, onerror=_fail):
            if folder == top:
                below[:] = [name for name in below if deep and name.startswith(begin)]
            for name in names:
                path = Path(folder, name)
                key = str(path.relative_to(self._root))
                with suppress(FileNotFoundError):
                    if key.startswith(prefix):
                        found = path.stat()
                        yield key, found.st_mtime, found.st_size

    def _now(self, mtimes: Iterable[float]) -> float:
        """Return the time by the clock that the file system gives files their times by.

        The server of a shared file system may have another time than this machine. On a file system that
        refuses changes (it is full or read-only) the newest of `mtimes` is returned. Ages are then too
        small, so that nothing is deleted too early.
        """
        try:
            os.utime(self._root)
            return self._root.stat().st_mtime
        except OSError:
            return max(mtimes, default=0.0)


@contextmanager
def _store_errors(operation: str) -> Iterator[None]:
    """Convert an OSError as `disk_errors` does, and one that may pass to UnavailableError, as of a server."""
    try:
        yield
    except OSError as error:
        if error.errno in MAY_PASS:
            raise UnavailableError(f"{operation}: {error.strerror or error}") from error
        raise disk_error(error, operation) from error


def _write(fd: int, parts: Iterable[Part]) -> ObjectInfo:
    """Write the parts durably, and return length and checksum of what they should be."""
    size, crc = 0, 0
    for part in parts:
        size = _write_part(fd, part, size)
        crc = append_crc(crc, part.crc32c, part.length_bytes)
        del part  # before the next one is made
    os.fsync(fd)
    return ObjectInfo(size, crc)


def _write_part(fd: int, part: Part, offset: int) -> int:
    """Write a part at `offset`. Return the end of its bytes."""
    for data in part.data():
        write_at(fd, data, offset)
        offset += len(data)
    return offset


def _info(path: Path) -> ObjectInfo:
    """Read a file and return its length and checksum."""
    size, crc = 0, 0
    with read_errors(f"read of {path}"), _open(path) as fd:
        while data := os.read(fd, _SLICE_BYTES):
            crc = crc32c(data, crc)
            size += len(data)
    return ObjectInfo(size, crc)


def _read_back(temp: Path) -> ObjectInfo:
    """Like `_info`, for a file just written: that it cannot be read says nothing about its source."""
    try:
        return _info(temp)
    except UnreadableError as error:
        raise TierError(f"reading back {temp}: {error}") from error


@contextmanager
def _open(path: Path) -> Iterator[int]:
    try:
        fd = open_to_read(path, follows_links=True)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: not in the store") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(TEMP_PREFIX)


def _age(now: float, mtime: float) -> timedelta:
    return timedelta(seconds=max(0.0, now - mtime))


def _fail(error: OSError) -> None:
    """Let a listing fail that cannot read a directory. A directory that does not exist is empty."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
