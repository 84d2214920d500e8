"""Open, create and replace files in a directory that an untrusted process may change at any time.

The trainer can rename, replace and truncate every file in the volume that it shares with the sidecar.
The same path may resolve to two different files, a symbolic link may point into the sidecar's own
volume, and opening a FIFO may block forever. Every access therefore goes through a directory
descriptor, follows no link, never blocks, and accepts regular files only.

Callers must pass directories whose parent the untrusted process cannot replace, such as a mount point.

Layout documents are such files. A message names a document by its digest, and the receiver reads it. The
ranks write the layouts that they save or restore with, and the other side writes those of the restore point.
The trainer can change every file of the directory, so a document counts only if its size is bounded and its
digest matches.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import MAX_DOCUMENT_BYTES, digest_of, hex_of
from holdfast_core.ids import Digest

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Yield a descriptor of the directory. Its last component must not be a symbolic link.

    Raises:
        OSError: The directory does not exist, or the name belongs to something else.
    """
    descriptor = os.open(path, _DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def own_directory(parent: Path, name: str) -> Iterator[int]:
    """Yield a descriptor of a directory that this process's user owns and no other user may write to.

    A missing directory is created. Anything else with that name is renamed to a hidden name and never
    followed, so a trainer that replaces the directory loses its contents and gains nothing.

    Raises:
        OSError: `parent` cannot be opened or written to.
    """
    with opened_directory(parent) as above:
        try:
            descriptor = os.open(name, _DIRECTORY, dir_fd=above)
            if not _is_own(descriptor):
                os.close(descriptor)
                raise NotADirectoryError(name)
        except FileNotFoundError:
            descriptor = _made(above, name)
        except OSError:
            rename_hidden(above, name)
            descriptor = _made(above, name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _made(above: int, name: str) -> int:
    os.mkdir(name, 0o700, dir_fd=above)
    descriptor = os.open(name, _DIRECTORY, dir_fd=above)
    if not _is_own(descriptor):
        os.close(descriptor)
        raise PermissionError(f"{name}: another user replaced the directory while it was created")
    return descriptor


def _is_own(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def open_regular(directory: int, name: str, flags: int) -> int:
    """Open an existing regular file of the directory without blocking and without following a link.

    A file that is opened for writing must have only one name, because a hard link could make it one of
    the sidecar's own files.

    Returns:
        The descriptor, which the caller closes.

    Raises:
        FormatError: The name is not a regular file, or a file to be written has several hard links.
        OSError: The file cannot be opened.
    """
    descriptor = os.open(name, flags | _FILE, dir_fd=directory)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
        raise FormatError(f"{name} is {kind}: expected a regular file")
    if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
        os.close(descriptor)
        raise FormatError(f"{name} has {found.st_nlink} hard links: expected one link")
    return descriptor


def read_regular(directory: int, name: str, limit_bytes: int) -> bytes:
    """Read a whole file of at most `limit_bytes`.

    Raises:
        FormatError: The file is larger, or is not a regular file.
        OSError: The file cannot be opened or read.
    """
    descriptor = open_regular(directory, name, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        # A sparse file may claim any size, so the size is checked before memory is allocated.
        document = file.read(limit_bytes + 1) if size <= limit_bytes else b""
    if size > limit_bytes or len(document) > limit_bytes:
        raise FormatError(f"{name}: more than {limit_bytes} bytes")
    return document


def replace_file(directory: int, name: str, data: bytes, *, mode: int = 0o600) -> None:
    """Write a new file and rename it to `name`. What had that name is neither opened nor followed.

    The temporary name is random, so another process cannot create it first.

    Raises:
        OSError: The volume is full, or `name` is a directory.
    """
    temporary = _hidden(name)
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=directory
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        remove(directory, temporary)
        raise


def remove(directory: int, name: str) -> None:
    """Remove the name if it exists. Raises OSError (IsADirectoryError for a directory)."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return


def rename_hidden(directory: int, name: str) -> None:
    """Rename `name` to a random hidden name, whatever it is. Raises OSError."""
    os.rename(name, _hidden(name), src_dir_fd=directory, dst_dir_fd=directory)


def listen_unix(directory: Path, name: str, *, mode: int) -> socket.socket:
    """Listen on a new Unix socket, which replaces anything that has the name.

    The socket is bound and its mode is changed through descriptors. Thus a long path does not exceed the
    107 bytes of an address, and a link that replaces the socket meanwhile is not followed.

    Args:
        mode: Permissions of the socket.

    Returns:
        The non-blocking listener, which the caller closes.

    Raises:
        OSError: `directory` cannot be opened or written to.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with opened_directory(directory) as above:
            try:
                remove(above, name)
            except IsADirectoryError:
                rename_hidden(above, name)
            listener.bind(f"/proc/self/fd/{above}/{name}")
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            try:
                if stat.S_ISSOCK(os.fstat(found).st_mode):
                    Path(f"/proc/self/fd/{found}").chmod(mode)
            finally:
                os.close(found)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_unix(directory: Path, name: str, *, timeout_seconds: float) -> socket.socket:
    """Connect to a Unix socket of the directory. The time-out stays set on the socket. Raises OSError."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout_seconds)
        with opened_directory(directory) as above:
            client.connect(f"/proc/self/fd/{above}/{name}")
    except BaseException:
        client.close()
        raise
    return client


def _hidden(name: str) -> str:
    return f".{name}.{secrets.token_hex(16)}"


class LayoutFiles:
    """Layout documents in one directory. A document appears atomically. Calls block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._written: set[Digest] = set()

    def ensure(self, document: bytes, digest: Digest) -> None:
        """Write the document unless it is there. Raises UnavailableError."""
        path = self.directory / _name(digest)
        if digest in self._written and path.exists():
            return
        # A document that is there already is not written again, so that a full volume does not fail the
        # later ones of several ranks that need the same document.
        with suppress(HoldfastError):
            self.read(digest)
            self._written.add(digest)
            return
        try:
            self._write(path.name, document)
        except OSError as error:
            raise UnavailableError(f"writing layout {path}: {error}") from error
        self._written.add(digest)

    def read(self, digest: Digest) -> bytes:
        """Return a document.

        Raises:
            NotFoundError: It is not in the directory.
            FormatError: It is too large, or is no regular file.
            CorruptionError: It has another digest.
            UnavailableError: It cannot be read.
        """
        path = self.directory / _name(digest)
        try:
            with opened_directory(self.directory) as directory:
                document = read_regular(directory, path.name, MAX_DOCUMENT_BYTES)
        except FileNotFoundError as error:
            raise NotFoundError(f"layout {path} does not exist") from error
        except OSError as error:
            raise UnavailableError(f"reading layout {path}: {error}") from error
        found = digest_of(document)
        if found != digest:
            raise CorruptionError(f"layout {path}: the document's digest is {found}")
        return document

    def remove(self, digest: Digest) -> None:
        """Remove a document that no process will read any more. A failure only costs its room."""
        self._written.discard(digest)
        with suppress(OSError), opened_directory(self.directory) as directory:
            remove(directory, _name(digest))

    def clear(self) -> None:
        """Remove all documents. A failure only costs their room."""
        self._written.clear()
        with suppress(OSError), opened_directory(self.directory) as directory:
            with os.scandir(directory) as found:
                names = [entry.name for entry in found]
            for name in names:
                with suppress(OSError):
                    remove(directory, name)

    def _write(self, name: str, document: bytes) -> None:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with opened_directory(self.directory.parent) as above, suppress(FileExistsError):
            os.mkdir(self.directory.name, 0o700, dir_fd=above)
            with opened_directory(self.directory) as created:
                # The other side may have another uid and the same group. The mode is set through the
                # descriptor, and only if the directory was created here: by now the trainer could have
                # replaced the path by a link to a directory of the sidecar.
                os.fchmod(created, 0o2770)
        with opened_directory(self.directory) as directory:
            replace_file(directory, name, document, mode=0o660)


def _name(digest: Digest) -> str:
    return f"{hex_of(digest)}.json"
