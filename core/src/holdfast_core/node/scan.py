"""The scan of the node's disk at the start of a process: whole shards, torn ones and dead temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    UnreadableError,
)
from holdfast_core.node.documents import RESERVED, files_below, listing_failed, read_shard
from holdfast_core.node.files import (
    TEMP_PREFIX,
    BufferPool,
    disk_errors,
    fsync_directory,
    read_errors,
    remove_dead_temp,
)
from holdfast_core.shards.file import ShardRecord


@dataclass(frozen=True, slots=True)
class TornShard:
    """A shard file that is damaged or misplaced."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Result of `scan`."""

    shards: tuple[ShardRecord, ...]
    """The shard files whose head, trailer, length and name match."""
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
    shards: list[ShardRecord] = []
    torn: list[TornShard] = []
    skipped: list[str] = []
    removed = 0
    other_bytes = 0
    if not read_only:
        for directory in _directories(root):
            _make_durable(directory)
    for path in files_below(root):
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
            shards.append(read_shard(root, path, buffers))
        except FileNotFoundError:
            continue  # another process has pruned it
        except FormatError as error:
            if isinstance(error, CorruptionError) and not isinstance(error, UnreadableError):
                torn.append(TornShard(path, str(error)))
            else:
                skipped.append(f"{path}: {error}")
                other_bytes += size
    return ScanResult(tuple(shards), tuple(torn), removed, tuple(skipped), other_bytes)


def _make_durable(directory: Path) -> None:
    with disk_errors(f"fsync of {directory}"):
        try:
            fsync_directory(directory)
        except FileNotFoundError:
            return  # another process has pruned it


def _directories(root: Path) -> Iterator[Path]:
    with disk_errors(f"listing {root}"):
        for directory, _, _ in os.walk(root, onerror=listing_failed, followlinks=False):
            yield Path(directory)
