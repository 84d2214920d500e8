"""The files of the image holdfast/sdk, which brings the SDK to images of trainers.

    FROM anything with Python 3.11 or newer and torch
    COPY --from=holdfast/sdk:VERSION /opt/holdfast /opt/holdfast

or, without a build, an init container of this image copies them to a volume (`copy_to.py`).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tools.release import trees, wheels
from tools.release.source import Source

SDK = trees.Program("holdfast", "holdfast-sdk", "holdfast.__main__", from_user=("numpy",))
"""A trainer's image has torch, and with it numpy. Both would be too large, and of another version."""
MEMBERS = ("core", "trainer_sdk")


def fill(
    root: Path,
    source: Source,
    target: Path,
    *,
    platform: str,
    pythons: tuple[str, ...] = trees.PYTHONS,
) -> None:
    """Write the files of /opt/holdfast to a new folder."""
    members = {member: wheels.DISTRIBUTIONS[member] for member in MEMBERS}
    target.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        own = wheels.built(root, source.epoch, members, Path(folder))
        trees.build(root, SDK, list(own.values()), target, platform=platform, pythons=pythons)
    shutil.copyfile(root / "tools/release/copy_to.py", target / "copy_to.py")
    shutil.copyfile(root / "LICENSE", target / "LICENSE")
