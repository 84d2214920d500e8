"""Location of the servers that the test bed built.

No other module of this package reads the environment.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

TESTBED_DIR_VARIABLE = "HOLDFAST_TESTBED_DIR"


def testbed_dir() -> Path:
    """Return the directory of the test bed's binaries and state."""
    given = os.environ.get(TESTBED_DIR_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "holdfast" / "testbed"


def find_tool(name: str) -> Path | None:
    """Return the path of an executable from PATH or the test bed's `bin`, in this order, or None."""
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    built = testbed_dir() / "bin" / name
    return built if os.access(built, os.X_OK) else None
