"""Small file systems in image files, for behaviour that only some kinds of file system have."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MIB = 512
"""Size of an image in MiB. mkfs.xfs requires at least 300."""


def cannot_make(kind: str) -> str | None:
    """Return why this process cannot create and mount a file system of this kind, or None if it can."""
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    if shutil.which(f"mkfs.{kind}") is None:
        return f"there is no mkfs.{kind}: install xfsprogs or btrfs-progs"
    kinds = Path("/proc/filesystems").read_text().split()
    return None if kind in kinds else f"the kernel has no {kind}"


def make_image(kind: str, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(_MIB << 20)
    subprocess.run([f"mkfs.{kind}", "-q", "-f", path], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def mounted(image: Path, path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@contextmanager
def small_volume(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory, of which nothing else takes room. It needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def free_bytes(path: Path) -> int:
    subprocess.run(["sync", "-f", path], check=True)
    volume = os.statvfs(path)
    return volume.f_bfree * volume.f_frsize
