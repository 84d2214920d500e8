"""Scan of the node's disk when a process starts: whole shards, torn shards, dead temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import CorruptionError, FormatError, NotFoundError, UnreadableError
from holdfast_core.format.keys import (
    MANIFESTS,
    ManifestKey,
    ShardObject,
    ShardObjectKey,
    parse_key,
    shard_key,
)
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, Digest, JobUid
from holdfast_core.node.documents import read_document
from holdfast_core.node.files import (
    TEMP_PREFIX,
    BufferPool,
    disk_errors,
    fsync_directory,
    open_to_read,
    read_errors,
    remove_dead_temp,
)
from holdfast_core.node.paths import RESERVED
from holdfast_core.node.shard_file import read_record
from holdfast_core.shards.record import ShardRecord


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A shard file whose head, trailer, length and name match."""

    path: Path
    record: ShardRecord


@dataclass(frozen=True, slots=True)
class TornShard:
    """A shard file that is damaged or misplaced."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Result of `scan`."""

    shards: tuple[FoundShard, ...]
    torn: tuple[TornShard, ...]
    removed_temporaries: int
    skipped: tuple[str, ...]
    """Path and reason of each file that cannot be read, has an unknown name or a newer format version."""
    other_bytes: int
    """Total size of documents, skipped files and files of reserved directories."""


def scan(root: Path, buffers: BufferPool, *, read_only: bool = False) -> ScanResult:
    """Read head and trailer of every shard below `root`, and remove temporary files of dead writers.

    Payloads are not read. A file that cannot be read, or that another process removes meanwhile, is skipped:
    it says nothing about the other files. An error of a listing is raised. First, fsync is
    called on every directory: a process that was killed between a rename and that fsync leaves a name
    that a power cut could still remove.

    Args:
        root: Directory of the tier.
        buffers: Pool of the read buffers.
        read_only: Change nothing on the disk and call no fsync.
    """
    shards: list[FoundShard] = []
    torn: list[TornShard] = []
    skipped: list[str] = []
    removed = 0
    other_bytes = 0
    if not read_only:
        for directory in _directories(root):
            _make_durable(directory)
    for path in _files(root):
        size = 0
        try:
            if path.name.startswith(TEMP_PREFIX):
                if not read_only:
                    removed += remove_dead_temp(path)
                continue
            with read_errors(f"looking at {path}"):
                size = path.lstat().st_size
            parts = path.relative_to(root).parts
            if parts[0] in RESERVED or not parts[-1].endswith(".shard"):
                other_bytes += size
                continue
            shards.append(FoundShard(path, read_shard(root, path, buffers)))
        except FileNotFoundError:
            continue  # another process has pruned it
        except FormatError as error:
            if isinstance(error, CorruptionError) and not isinstance(error, UnreadableError):
                torn.append(TornShard(path, str(error)))
            else:
                skipped.append(f"{path}: {error}")
                other_bytes += size
    return ScanResult(tuple(shards), tuple(torn), removed, tuple(skipped), other_bytes)


def list_manifests(root: Path) -> Iterator[tuple[JobUid, CheckpointId]]:
    """Yield the manifests by their names. The documents are not read and may be damaged."""
    with disk_errors(f"listing {root}"):
        jobs = sorted(root.iterdir()) if root.is_dir() else []
    for job in jobs:
        if job.name in RESERVED or not job.is_dir():
            continue
        # A directory at the name of a manifest counts as a manifest that cannot be read: if it did not count,
        # a restore would go back to an older step without a word.
        for path in _files(job / MANIFESTS, directories=True):
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
    for path in _files(root):
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


def _make_durable(directory: Path) -> None:
    with disk_errors(f"fsync of {directory}"):
        try:
            fsync_directory(directory)
        except FileNotFoundError:
            return  # another process has pruned it


def _directories(root: Path) -> Iterator[Path]:
    with disk_errors(f"listing {root}"):
        for directory, _, _ in os.walk(root, onerror=_listing_failed, followlinks=False):
            yield Path(directory)


def _files(root: Path, *, directories: bool = False) -> Iterator[Path]:
    if not root.is_dir():
        return
    with disk_errors(f"listing {root}"):
        for directory, names, files in os.walk(root, onerror=_listing_failed, followlinks=False):
            names.sort()
            for name in sorted([*files, *names] if directories else files):
                yield Path(directory) / name


def _listing_failed(error: OSError) -> None:
    """Raise a failed listing, which `os.walk` would take for an empty directory.

    A step whose manifest is not listed looks as if nothing needed its shards. Two errors mean that there is
    nothing to list: another process has pruned the directory, or it belongs to another user (lost+found).
    """
    if not isinstance(error, FileNotFoundError | PermissionError):
        raise error
