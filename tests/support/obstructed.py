"""Put something else in the place of a file, which a reader must neither follow nor wait for."""

from __future__ import annotations

import os
from pathlib import Path


def link(path: Path) -> None:
    kept = path.with_suffix(".moved")
    path.rename(kept)
    path.symlink_to(kept)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "a file").write_text("of somebody")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
