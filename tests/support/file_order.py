"""The order in which files of tests begin.

`make test` gives each file to one of several processes. A long file that begins last would run alone, and
all other processes would wait for it. pytest's own order knows the number of tests of a file, not their
time, so the Makefile switches it off (`--no-loadscope-reorder`). tools/file_seconds.py writes the times.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "file_seconds.json"


@functools.cache
def _seconds() -> dict[str, float]:
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def place_of(path: str) -> float:
    """Return the place of a file, whose path below tests/ is given, among all files: the longest first."""
    return -_seconds().get(path, 0.0)
