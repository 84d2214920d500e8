"""Small file systems in memory, for tests of a full disk."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_volume(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory, of which nothing else takes room. It needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
