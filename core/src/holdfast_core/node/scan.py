"""What a process finds on the node's disk when it starts: whole shards, torn ones, leftovers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.keys import ManifestKey, ShardKey, parse_key, shard_key
from holdfast_core.ids import CheckpointId, JobUid
from holdfast_core.node.files import (
    TEMP_PREFIX,
    BufferPool,
    disk_errors,
    fsync_directory,
    remove_dead_temp,
)
from holdfast_core.node.shard_file import read_record
from holdfast_core.shards.record import ShardRecord


@dataclass(frozen=True, slots=True)
class FoundShard:
    path: Path
    record: ShardRecord


@dataclass(frozen=True, slots=True)
class TornShard:
    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ScanResult:
    shards: tuple[FoundShard, ...]
    torn: tuple[TornShard, ...]
    removed_temporaries: int
    skipped: tuple[str, ...]
    """Files that are not ours to judge: other names, or a newer format version."""
    other_bytes: int
    """Of documents and skipped files."""


def scan(
    root: Path, reserved: frozenset[str], buffers: BufferPool, *, read_only: bool = False
) -> ScanResult:
    """Read head and trailer of every shard below the jobs' directories of `root`; remove temporary
    files whose writers are gone. Payloads are not read. With `read_only` nothing is changed, and a shard
    that another process removes meanwhile is passed over.

    Without `read_only`, what is found is durable when this returns: a process that was killed between
    a rename and the fsync of its directory leaves a name that everybody sees and that a power cut takes
    away.
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
        if path.name.startswith(TEMP_PREFIX):
            if not read_only:
                removed += remove_dead_temp(path)
            continue
        try:
            size = path.lstat().st_size
            parts = path.relative_to(root).parts
            if parts[0] in reserved or not parts[-1].endswith(".shard"):
                other_bytes += size
                continue
            shards.append(FoundShard(path, read_shard(root, path, buffers)))
        except FileNotFoundError:
            continue  # pruned by another process meanwhile
        except CorruptionError as error:
            torn.append(TornShard(path, str(error)))
        except FormatError as error:
            skipped.append(f"{path}: {error}")
            other_bytes += size
    return ScanResult(tuple(shards), tuple(torn), removed, tuple(skipped), other_bytes)


def list_manifests(root: Path, reserved: frozenset[str]) -> Iterator[tuple[JobUid, CheckpointId]]:
    """Names alone; a document may still prove to be damaged."""
    for job in sorted(root.iterdir()) if root.is_dir() else ():
        if job.name in reserved or not job.is_dir():
            continue
        for path in _files(job / "manifests"):
            try:
                key = parse_key(path.relative_to(job).as_posix())
            except FormatError:
                continue  # a temporary file
            if isinstance(key, ManifestKey):
                yield JobUid(job.name), key.checkpoint


def read_shard(root: Path, path: Path, buffers: BufferPool) -> ShardRecord:
    """What the file says of itself. Raises FileNotFoundError, OSError, CorruptionError, FormatError."""
    parts = path.relative_to(root).parts
    key = parse_key("/".join(parts[1:]))
    if not isinstance(key, ShardKey) or key.packed:
        raise FormatError(f"{path}: not where shards lie")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        record = read_record(fd, path, buffers).record
    finally:
        os.close(fd)
    if record.header.job_uid != parts[0] or shard_key(record.ref) != "/".join(parts[1:]):
        raise CorruptionError(f"{path}: the file says it is {record.ref}: renamed or misdirected")
    return record


def _make_durable(directory: Path) -> None:
    with disk_errors(f"fsync of {directory}"):
        try:
            fsync_directory(directory)
        except FileNotFoundError:
            return  # pruned by another process meanwhile


def _directories(root: Path) -> Iterator[Path]:
    with disk_errors(f"listing {root}"):
        for directory, _, _ in os.walk(root, followlinks=False):
            yield Path(directory)


def _files(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        return
    with disk_errors(f"listing {root}"):
        for directory, names, files in os.walk(root, followlinks=False):
            names.sort()
            for name in sorted(files):
                yield Path(directory) / name
