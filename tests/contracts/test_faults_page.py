"""Faults that tests show are full clauses, and pages name promises and tests that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tools import faults

TESTS = Path(__file__).parent.parent
GUARANTEES = (TESTS.parent / "docs" / "guarantees.md").read_text()
MEMBERS = ("core", "operator", "sidecar", "trainer_sdk", "cli")
MARKS = tuple(faults.marks(TESTS))


def test_every_fault_is_a_clause_that_says_what_happens() -> None:
    """A row is read without its test: `The store answers 503`, and neither `503` nor a number of a list."""
    assert len(MARKS) > 500
    poor = {
        mark.fault
        for mark in MARKS
        if not re.match(r"[A-Z]", mark.fault)
        or len(mark.fault.split()) < 4
        or mark.fault.endswith((".", ":", ","))
        or re.search(r"\b[FT]\d{1,3}\b", mark.fault)
    }
    assert poor == set()


def test_a_fault_is_named_once_for_each_test_and_spelled_in_one_way() -> None:
    assert [mark for mark, times in Counter(MARKS).items() if times > 1] == []
    spellings: dict[str, set[str]] = {}
    for mark in MARKS:
        spellings.setdefault(re.sub(r"\W+", " ", mark.fault.lower()).strip(), set()).add(mark.fault)
    assert [several for several in spellings.values() if len(several) > 1] == []


def test_no_test_or_comment_names_a_fault_by_a_number() -> None:
    numbered = re.compile(r"\bdef test_f\d+_|\bfaults? F\d+|\(F(?!16|32|64)\d{2,3}\b|[\"']F\d{2}-")
    sources = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    assert [str(path) for path in sources if numbered.search(path.read_text())] == []


def test_every_promise_has_a_test() -> None:
    rows = re.findall(r"^\| I(\d) \| [^|]+ \| ([^|]+) \|$", GUARANTEES, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 8))
    assert all("::" in tests for _, tests in rows)


def test_every_rule_that_the_code_names_is_defined() -> None:
    sources = [path for member in MEMBERS for path in (TESTS.parent / member / "src").rglob("*.py")]
    named = {rule for path in sources for rule in re.findall(r"\bR\d{1,2}\b", path.read_text())}
    assert named <= set(re.findall(r"^\| (R\d+) \|", GUARANTEES, re.MULTILINE))


@pytest.mark.parametrize("page", ["guarantees", "techniques"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    text = (TESTS.parent / "docs" / f"{page}.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", text))
    assert len(named) > 10
    missing = [
        f"{path}::{test}"
        for path, test in sorted(named)
        if not (TESTS / path).is_file()
        or not re.search(rf"\b(def|class) {test}\(", (TESTS / path).read_text())
    ]
    assert missing == []
