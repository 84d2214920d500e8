"""Write the time of each test file to tests/file_seconds.json, from reports of pytest.

`python -m tools.file_seconds REPORT.xml...`, where `pytest --junitxml=REPORT.xml` wrote the reports. Files
that are in no report keep their time, and files that are gone lose theirs. The times order the files of a
run (tests/support/file_order.py), and let `make quick` choose. A time that is missing or wrong only makes a
run longer.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
FILE = TESTS / "file_seconds.json"
LEAST_SECONDS = 1.0
"""Shorter files are left out, because their order does not matter."""


def of_report(report: str, tests: Path) -> dict[str, float]:
    """Return the seconds of each test file in a report, by its path below `tests`."""
    found: dict[str, float] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        file = _file_of(case.get("classname", ""), tests)
        if file is not None:
            found[file] = found.get(file, 0.0) + float(case.get("time", "0"))
    return found


def _file_of(class_name: str, tests: Path) -> str | None:
    """Return the file of `tests.core.test_a` or `tests.core.test_a.TestClass`, or None."""
    parts = class_name.split(".")[1:]
    for end in (len(parts), len(parts) - 1):
        file = Path(*parts[:end]).with_suffix(".py")
        if (tests / file).is_file():
            return file.as_posix()
    return None


def merged(known: Mapping[str, float], new: Mapping[str, float], tests: Path) -> dict[str, float]:
    """Return the times to write, by file."""
    every = {**known, **new}
    return {
        file: round(seconds)
        for file, seconds in sorted(every.items())
        if seconds >= LEAST_SECONDS and (tests / file).is_file()
    }


def main(reports: list[str]) -> int:
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    new: dict[str, float] = {}
    for report in reports:
        new |= of_report(Path(report).read_text(), TESTS)
    FILE.write_text(json.dumps(merged(known, new, TESTS), indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
