"""Small file systems of their own, in a file: for what only some kinds of file system can do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MIB = 512
"""The least that mkfs.xfs takes is 300."""


def cannot_make(kind: str) -> str | None:
    """Why this process cannot make and mount a file system of this kind, or None."""
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


def free_bytes(path: Path) -> int:
    subprocess.run(["sync", "-f", path], check=True)
    volume = os.statvfs(path)
    return volume.f_bfree * volume.f_frsize
