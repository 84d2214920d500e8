"""The order in which files of tests begin, and which files run in one process.

`make test` gives each file to one of several processes. A long file that begins last would run alone, and
all other processes would wait for it. pytest's own order knows the number of tests of a file, not their
time, so the Makefile switches it off (`--no-loadscope-reorder`). tools/file_seconds.py writes the times.

The files of a folder in FOLDERS share an API server. It takes eight CPU seconds to start and a thirtieth of a
core to wait, so one process runs all of them, without those of folders below. A folder that takes longer than
half of all integration tests decides how long these take: divide it.
"""

from __future__ import annotations

import collections
import functools
import json
from pathlib import Path

FOLDERS = ("integration/operator", "integration/operator/faults", "charts")
FILE = Path(__file__).resolve().parents[1] / "file_seconds.json"


@functools.cache
def _seconds() -> dict[str, float]:
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def unit_of(path: str) -> str:
    """Return what one process runs: the file, whose path below tests/ is given, or its folder in FOLDERS."""
    folder = path.rpartition("/")[0]
    return folder if folder in FOLDERS else path


@functools.cache
def _unit_seconds() -> dict[str, float]:
    found: dict[str, float] = collections.defaultdict(float)
    for path, seconds in _seconds().items():
        found[unit_of(path)] += seconds
    return found


def place_of(path: str) -> tuple[float, str]:
    """Return the place of a file, whose path below tests/ is given, among all files: the longest first."""
    unit = unit_of(path)
    return -_unit_seconds().get(unit, 0.0), unit
