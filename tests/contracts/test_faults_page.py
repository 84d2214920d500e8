"""docs/faults.md and docs/guarantees.md name every fault and every promise once, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "faults.md").read_text()
GUARANTEES = (DOCS / "guarantees.md").read_text()
ROWS = re.findall(r"^\| F(\d+) ([^|]+) \| ([^|]+) \|(.*)\|$", PAGE, re.MULTILINE)
MEMBERS = ("core", "operator", "sidecar", "trainer_sdk", "cli")
WANTED = [
    *range(1, 33),
    *range(40, 63),
    *range(64, 80),
    *range(89, 127),
    *range(133, 197),
    *range(198, 413),
    *range(414, 433),
    *range(441, 473),
    *range(477, 483),
    *range(484, 503),
    *range(504, 526),
    *range(537, 555),
    *range(558, 560),
    561,
    *range(563, 612),
    *range(615, 788),
    *range(790, 812),
    *range(820, 829),
    *range(830, 832),
    *range(840, 842),
    *range(845, 854),
    *range(855, 876),
    *range(880, 905),
    *range(915, 918),
    920,
]


def test_every_fault_has_one_row_in_order() -> None:
    assert [int(number) for number, *_ in ROWS] == WANTED


def test_every_row_has_a_test() -> None:
    assert [number for number, _, test, _ in ROWS if "::" not in test] == []


def test_every_threat_has_one_row_with_a_test_in_order() -> None:
    rows = re.findall(r"^\| T(\d+) [^|]+ \| ([^|]+) \|.*\|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 10))
    assert [number for number, test in rows if "::" not in test] == []


def test_every_promise_has_a_test() -> None:
    rows = re.findall(r"^\| I(\d) \| [^|]+ \| ([^|]+) \|$", GUARANTEES, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 8))
    assert all("::" in tests for _, tests in rows)


def test_every_rule_that_the_code_names_is_defined() -> None:
    sources = [path for member in MEMBERS for path in (TESTS.parent / member / "src").rglob("*.py")]
    named = {rule for path in sources for rule in re.findall(r"\bR\d{1,2}\b", path.read_text())}
    assert named <= set(re.findall(r"^\| (R\d+) \|", GUARANTEES, re.MULTILINE))


@pytest.mark.parametrize("page", [PAGE, GUARANTEES], ids=["faults", "guarantees"])
def test_every_test_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", page))
    assert len(named) > 10
    missing = [
        f"{path}::{test}"
        for path, test in sorted(named)
        if not (TESTS / path).is_file() or f"def {test}(" not in (TESTS / path).read_text()
    ]
    assert missing == []
