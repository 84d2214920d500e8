"""File operations for every participant: fsync, removal, and dropping pages from the page cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def _walk(path: Path) -> tuple[list[Path], list[Path]]:
    """Return files and directories at and below `path`. Other processes may remove some of them meanwhile."""
    if path.is_file():
        return [path], []
    found: list[Path] = []
    directories: list[Path] = []
    for folder, _, names in os.walk(path):
        directories.append(Path(folder))
        found += [Path(folder) / name for name in names]
    return found, directories


def _files(path: Path) -> list[Path]:
    return _walk(path)[0]


def fsync_tree(path: Path) -> None:
    """Fsync every file below `path`, then every directory, and the parent of `path`.

    Files that their owner removes meanwhile are skipped.
    """
    found, directories = _walk(path)
    for entry in (*found, *directories, path.parent):
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(path: Path) -> None:
    """Fsync these files and drop their pages from the page cache. Other files stay cached."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(path: Path) -> None:
    """Read a file into the page cache."""
    buffer = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def total_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
