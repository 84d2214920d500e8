"""docs/faults.md names every fault of a checkpoint's path once, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = (TESTS.parent / "docs/faults.md").read_text()
ROWS = re.findall(r"^\| F(\d+) ([^|]+) \| ([^|]+) \|(.*)\|$", PAGE, re.MULTILINE)
WANTED = [*range(1, 33), *range(40, 63), *range(89, 385)]


def test_every_fault_has_one_row_in_order() -> None:
    assert [int(number) for number, *_ in ROWS] == WANTED


def test_every_row_has_a_test() -> None:
    assert [number for number, _, test, _ in ROWS if "::" not in test] == []


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 30
    missing = [
        f"{path}::{test}"
        for path, test in sorted(named)
        if not (TESTS / path).is_file() or f"def {test}(" not in (TESTS / path).read_text()
    ]
    assert missing == []
