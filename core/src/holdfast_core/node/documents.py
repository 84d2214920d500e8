"""Manifests, layouts, the restart round and a spare's worker as small files on the node's disk.

A manifest or layout file is the document, a newline, the document's digest and a newline. The digest
shows a document that was damaged on the disk; the node has no other record of its contents. The files
of round and worker are canonical JSON without a digest.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    NotFoundError,
    StaleRoundError,
)
from holdfast_core.format.canonical import (
    SEAL_BYTES,
    digest_of,
    dumps_canonical,
    expect_int,
    expect_object,
    loads_strict,
    sealed,
    unsealed,
)
from holdfast_core.ids import Digest, RestartRound, Worker
from holdfast_core.node.files import (
    DurableDirectories,
    TempFile,
    disk_errors,
    fsync_directory,
    make_directories,
    open_to_read,
    read_errors,
    write_at,
)

ROUND_FILE = "round.json"
WORKER_FILE = "worker.json"
_ROUND_FIELDS = frozenset({"round", "version"})
_WORKER_FIELDS = frozenset({"worker"})
_MAX_ROUND_BYTES = 4096


def stored_bytes(document: bytes) -> int:
    """Return the length of the file of `document` in bytes."""
    return len(document) + SEAL_BYTES


def write_document(path: Path, document: bytes, directories: DurableDirectories) -> bool:
    """Write the document durably, put-if-absent.

    Returns:
        False if the same document exists already.

    Raises:
        AlreadyExistsError: Another document exists at `path`.
        CorruptionError: The document at `path` is damaged.
    """
    digest = digest_of(document)
    if _is_there(path, digest):
        return False
    with _written(path, sealed(document), directories) as temp:
        if temp.publish_if_absent(path):
            return True
    _is_there(path, digest)
    return False


@contextmanager
def _written(path: Path, data: bytes, directories: DurableDirectories) -> Iterator[TempFile]:
    """Write a temporary file beside `path` durably. It is removed unless the body publishes it."""
    with disk_errors(f"creating a temporary file for {path}"):
        temp = TempFile.create(path.parent, directories)
    try:
        with disk_errors(f"writing {path}"):
            write_at(temp.fd, memoryview(data), 0)
            temp.sync()
            yield temp
    finally:
        temp.discard()


def _is_there(path: Path, digest: Digest) -> bool:
    """Return whether the document exists, and make its name durable if it does.

    Raises AlreadyExistsError, CorruptionError.
    """
    try:
        found = digest_of(read_document(path))
    except NotFoundError:
        return False
    if found != digest:
        raise AlreadyExistsError(
            f"{path}: the file has the document {found}, refused to write {digest}"
        )
    # Its writer may still be before this fsync, or may have died before it.
    with disk_errors(f"fsync of {path.parent}"):
        fsync_directory(path.parent)
    return True


def read_document(path: Path) -> bytes:
    """Return the document without its digest. Raises NotFoundError, CorruptionError."""
    return unsealed(_read(path), str(path))


def replace_document(path: Path, document: bytes, *, durable: bool = False) -> None:
    """Write the document with its digest, atomically, in place of an earlier one.

    Args:
        path: The file. Its directory is created if it is missing.
        document: The document.
        durable: Whether a power failure after this call may not take it.
    """
    with disk_errors(f"writing {path}"):
        if durable:
            make_directories(path.parent)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            file.write(sealed(document))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if path.is_dir():  # a rename replaces any file, but no directory
            path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}.bad"))
        temporary.replace(path)
        if durable:
            fsync_directory(path.parent)


class PodRecords:
    """What a node tier keeps of its pod: the restart round, and the worker that a spare pod has become."""

    def __init__(self, root: Path, directories: DurableDirectories) -> None:
        self._round, self._worker = root / ROUND_FILE, root / WORKER_FILE
        self._directories = directories
        self._lock = threading.Lock()

    def read_round(self) -> tuple[RestartRound, int] | None:
        """Return the newest (round, version) that was written, or None. Raises CorruptionError."""
        found = _read_numbers(self._round, _ROUND_FIELDS)
        return None if found is None else (RestartRound(found["round"]), found["version"])

    def write_round(self, round_: RestartRound, version: int) -> None:
        """Write (round, version) durably. Raises StaleRoundError if the file holds a newer pair."""
        with self._lock:
            recorded = self.read_round()
            if recorded is not None and recorded > (round_, version):
                raise StaleRoundError(
                    f"{self._round}: the file has round {recorded[0]} version {recorded[1]}, refused to "
                    f"write the older round {round_} version {version}",
                    own_round=recorded[0],
                    own_version=recorded[1],
                )
            self._write(self._round, {"round": round_, "version": version})

    def read_worker(self) -> Worker | None:
        """Return the worker that this spare pod has become, or None. Raises CorruptionError."""
        found = _read_numbers(self._worker, _WORKER_FIELDS)
        return None if found is None else Worker(found["worker"])

    def write_worker(self, worker: Worker) -> None:
        """Write the worker that this spare pod becomes durably."""
        with self._lock:
            self._write(self._worker, {"worker": worker})

    def _write(self, path: Path, numbers: dict[str, int]) -> None:
        with _written(path, dumps_canonical(numbers), self._directories) as temp:
            temp.publish(path)


def _read_numbers(path: Path, names: frozenset[str]) -> dict[str, int] | None:
    try:
        data = _read(path)
    except NotFoundError:
        return None
    try:
        value = loads_strict(data, str(path), limit_bytes=_MAX_ROUND_BYTES)
        fields = expect_object(value, str(path), names)
        return {name: expect_int(fields[name], f"{path}: {name}") for name in sorted(names)}
    except FormatError as error:
        raise CorruptionError(str(error)) from error


def _read(path: Path) -> bytes:
    try:
        fd = open_to_read(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file") from error
    with read_errors(f"reading {path}"), open(fd, "rb") as file:
        return file.read()
