"""The wheels of the distributions that users install. Operator and sidecar are published in images."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.release import archive
from tools.release.source import Source
from tools.release.uv import uv

DISTRIBUTIONS = {"core": "holdfast-core", "trainer_sdk": "holdfast-sdk", "cli": "holdfast-cli"}
"""Distribution by the folder of its workspace member."""


def build(root: Path, source: Source, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for wheel in built(root, source.epoch, DISTRIBUTIONS, Path(folder)).values():
            archive.write(out / wheel.name, wheel.read_bytes())


def built(root: Path, epoch: int, members: dict[str, str], folder: Path) -> dict[str, Path]:
    """Build a wheel of each member in `folder`, and return them by member. Equal sources give equal bytes."""

    def one(member: str) -> Path:
        uv(root, "build", "--wheel", "--out-dir", folder / member, root / member, epoch=epoch)
        return next((folder / member).glob("*.whl"))

    with ThreadPoolExecutor() as pool:
        return dict(zip(members, pool.map(one, members), strict=True))
