"""Every parser of foreign bytes: a bounded search from one seed, and all inputs that once failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.search import search
from tests.fuzz.targets import TARGETS

CASES = Path(__file__).parent / "cases"
SEED = 20_260_501
EXAMPLES = 60


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_accepted(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].parse(seed)


@pytest.mark.fault("A parser is given any bytes")
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_parser(name: str) -> None:
    search(TARGETS[name], seed=SEED, examples=EXAMPLES)


@pytest.mark.fault("A parser is given any bytes")
@pytest.mark.parametrize(
    "case", sorted(CASES.glob("*/*")), ids=lambda p: f"{p.parent.name}-{p.name}"
)
def test_an_input_that_once_failed_is_refused_or_read(case: Path) -> None:
    TARGETS[case.parent.name].run(case.read_bytes())
