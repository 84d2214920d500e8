"""Where the test bed keeps the servers that it built. The only reader of the environment here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

TESTBED_DIR_VARIABLE = "HOLDFAST_TESTBED_DIR"


def testbed_dir() -> Path:
    """Directory of the test bed's binaries and state."""
    given = os.environ.get(TESTBED_DIR_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "holdfast" / "testbed"


def find_tool(name: str) -> Path | None:
    """Path of an executable: PATH first, then the test bed's `bin`. None where it is nowhere."""
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    built = testbed_dir() / "bin" / name
    return built if os.access(built, os.X_OK) else None
