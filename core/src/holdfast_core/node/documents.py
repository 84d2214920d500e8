"""What lies on the node's disk besides the bytes of shards: names, documents, and layouts that are unused.

A manifest or layout file is the document, a newline, the document's digest and a newline. The digest
shows a document that was damaged on the disk; the node has no other record of its contents. The files
of round and worker are canonical JSON without a digest.

Layouts that no shard and no manifest names any more are deleted. A layout is written before the first shard
that names it, so a layout that nothing names may be one that is about to be used. The processes of a folder
do not know each other's saves. Therefore:

1. Every process marks a layout before it stores a shard that names it: it changes the time of the file, whose
   value means nothing, or writes the file.
2. `UnusedLayouts.look` lists the layouts with their marks, and then reads from the disk which layouts the
   shards and manifests name. The tier calls it from time to time while it deletes checkpoints.
3. A layout that is named by none of them at two looks an hour apart, and was not marked in between, is
   deleted.

The lock makes a mark one operation, and the last comparison with the deletion another one. A process that is
killed in between leaves a layout too many, which a later process deletes.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    StaleRoundError,
    TierError,
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
from holdfast_core.format.keys import (
    LAYOUTS,
    MANIFESTS,
    ManifestKey,
    ShardObject,
    ShardObjectKey,
    checked_job_uid,
    layout_key,
    manifest_key,
    parse_key,
    shard_key,
)
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, ShardRef, Worker
from holdfast_core.node.files import (
    TEMP_PREFIX,
    BufferPool,
    DurableDirectories,
    TempFile,
    disk_errors,
    fsync_directory,
    locked,
    make_directories,
    open_to_read,
    read_errors,
    write_at,
)
from holdfast_core.node.shard_file import read_record
from holdfast_core.node.volume import QUARANTINE, SPARE
from holdfast_core.shards.file import ShardRecord

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
        self._newest: tuple[RestartRound, int] | None = None
        """The pair in the file. It is read once: if the file is damaged later, a SEAL must still succeed."""

    def read_round(self) -> tuple[RestartRound, int] | None:
        """Return the newest (round, version) that was written, or None. Raises CorruptionError."""
        if self._newest is None:
            found = _read_numbers(self._round, _ROUND_FIELDS)
            if found is not None:
                self._newest = RestartRound(found["round"]), found["version"]
        return self._newest

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
            self._newest = round_, version

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


LOCK_FILE = ".layouts.lock"


RESERVED = frozenset({QUARANTINE, LAYOUTS, SPARE, ROUND_FILE, LOCK_FILE})
"""Names below the root of a tier that are no directories of jobs."""


def shard_path(root: Path, ref: ShardRef) -> Path:
    return _job_directory(root, ref.job_uid) / shard_key(ref)


def manifest_path(root: Path, job_uid: JobUid, checkpoint: CheckpointId) -> Path:
    return _job_directory(root, job_uid) / manifest_key(checkpoint)


def _job_directory(root: Path, job_uid: JobUid) -> Path:
    if job_uid in RESERVED:
        raise TierError(f"job uid {job_uid!r} is reserved by the node tier")
    return root / checked_job_uid(job_uid)


def list_manifests(root: Path) -> Iterator[tuple[JobUid, CheckpointId]]:
    """Yield the manifests by their names. The documents are not read and may be damaged."""
    with disk_errors(f"listing {root}"):
        jobs = sorted(root.iterdir()) if root.is_dir() else []
    for job in jobs:
        if job.name in RESERVED or not job.is_dir():
            continue
        # A directory at the name of a manifest counts as a manifest that cannot be read: if it did not count,
        # a restore would go back to an older step without a word.
        for path in files_below(job / MANIFESTS, directories=True):
            try:
                key = parse_key(path.relative_to(job).as_posix())
            except FormatError:
                continue  # a temporary file
            if isinstance(key, ManifestKey):
                yield JobUid(job.name), key.checkpoint


def layouts_in_use(root: Path, buffers: BufferPool) -> Iterator[Digest]:
    """Yield the layouts that the shards and manifests on the disk name, also those of other processes.

    Raises CorruptionError, FormatError and OSError where one of them cannot be read.
    """
    for path in files_below(root):
        relative = path.relative_to(root)
        if relative.parts[0] in RESERVED or path.name.startswith(TEMP_PREFIX):
            continue
        try:
            if path.suffix == ".shard":
                yield read_shard(root, path, buffers).header.layout
            elif relative.parts[1:2] == (MANIFESTS,):
                for shard in parse_manifest(read_document(path)).shards:
                    yield shard.layout
        except (FileNotFoundError, NotFoundError):
            continue  # another process has pruned it


def read_shard(root: Path, path: Path, buffers: BufferPool) -> ShardRecord:
    """Read the record of a shard file and compare it with the file's name.

    Raises:
        FileNotFoundError: The file does not exist.
        UnreadableError: The disk cannot read the file.
        CorruptionError: The file is damaged, or was renamed.
        FormatError: The name is not a shard's, or a newer release wrote the file.
    """
    parts = path.relative_to(root).parts
    key = parse_key("/".join(parts[1:]))
    if not isinstance(key, ShardObjectKey) or key.kind is not ShardObject.WHOLE:
        raise FormatError(f"{path}: expected the path of a shard")
    fd = open_to_read(path)
    try:
        record = read_record(fd, path, buffers).record
    finally:
        os.close(fd)
    if record.header.job_uid != parts[0] or shard_key(record.ref) != "/".join(parts[1:]):
        raise CorruptionError(
            f"{path}: the file is of {record.ref}: it was renamed or written to the wrong path"
        )
    return record


def files_below(root: Path, *, directories: bool = False) -> Iterator[Path]:
    if not root.is_dir():
        return
    with disk_errors(f"listing {root}"):
        for directory, names, files in os.walk(root, onerror=listing_failed, followlinks=False):
            names.sort()
            for name in sorted([*files, *names] if directories else files):
                yield Path(directory) / name


def listing_failed(error: OSError) -> None:
    """Raise a failed listing, which `os.walk` would take for an empty directory.

    A step whose manifest is not listed looks as if nothing needed its shards. Two errors mean that there is
    nothing to list: another process has pruned the directory, or it belongs to another user (lost+found).
    """
    if not isinstance(error, FileNotFoundError | PermissionError):
        raise error


UNUSED_SECONDS = 3600.0
"""Much longer than a save takes from the mark of its layout until its shard has its name. A commit looks for
the layouts of its shards, so that a save which took longer is not committed."""


_LOOK_EVERY = 16
"""Unused layouts are looked for each time that so many checkpoints were deleted. A state whose structure
changes at each save leaves a layout for each of them."""


_MARK_NS = 2_000_000_000
"""By so much a mark changes the time of a file. File systems keep times in units of up to two seconds (FAT,
Lustre, SMB), and would round a smaller change away: the layout would be deleted although it was marked."""


_Mark = tuple[int, int]
"""Inode and time of a file. Only compared for equality."""


_LOG = logging.getLogger(__name__)


def mark(path: Path) -> bool:
    """Mark a layout as about to be used. Return False if it does not exist. The caller holds the lock."""
    try:
        found = path.lstat()
        time_ns = found.st_mtime_ns + _MARK_NS
        os.utime(path, ns=(found.st_atime_ns, time_ns), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


class UnusedLayouts:
    """What this process knows about the layouts of a tier that nothing names. Not thread-safe."""

    def __init__(
        self,
        root: Path,
        buffers: BufferPool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an object that has not looked yet.

        Args:
            root: Directory of the tier.
            buffers: Pool of the read buffers.
            monotonic: Returns the seconds since any moment.
        """
        self._root = root
        self._buffers = buffers
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._deleted_checkpoints = 0
        self._seen: dict[Path, tuple[_Mark, float]] = {}
        """The layouts that nothing named at the last look: their marks, and the time of the first look that
        found the layout like this."""

    def checkpoint_deleted(self, known: Set[Digest]) -> int:
        """Look, if it is time, after a checkpoint was deleted. Return the bytes that this freed."""
        with self._lock:
            self._deleted_checkpoints += 1
            if self._deleted_checkpoints % _LOOK_EVERY != 0:
                return 0
            try:
                with disk_errors(f"deleting unused layouts of {self._root}"):
                    return self.look(known)
            except HoldfastError as error:  # it only costs the room of the layouts
                _LOG.warning("unused layouts are kept for now: %s", error)
                return 0

    def look(self, known: Set[Digest]) -> int:
        """Delete the layouts that are unused for long enough. Return the size of their files in bytes.

        Args:
            known: Layouts that are in use. If there are no others, no shard is read.

        Raises:
            CorruptionError, FormatError: A shard or a manifest cannot be read. It may name any layout, so
                that none is deleted.
            OSError: The disk failed.
        """
        before, self._seen, now = self._seen, {}, self._monotonic()
        directory = self._root / LAYOUTS
        paths = [path for path in sorted(directory.iterdir()) if not _is_temporary(path)]
        marks = {path: found for path in paths if (found := _mark_of(path)) is not None}
        for digest in known:
            marks.pop(self._root / layout_key(digest), None)
        if not marks:
            return 0
        for digest in layouts_in_use(self._root, self._buffers):
            marks.pop(self._root / layout_key(digest), None)
        sys.audit("holdfast.node.layouts_scanned")
        freed = 0
        for path, found in marks.items():
            last, since = before.get(path, (None, now))
            if last != found or now - since < UNUSED_SECONDS:
                self._seen[path] = found, since if last == found else now
                continue
            with locked(self._root / LOCK_FILE):
                if _mark_of(path) == found:
                    sys.audit("holdfast.node.before_layout_delete")
                    freed += path.lstat().st_size
                    path.unlink()
        return freed


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMP_PREFIX)


def _mark_of(path: Path) -> _Mark | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None  # another process has deleted or quarantined it
    return found.st_ino, found.st_mtime_ns
