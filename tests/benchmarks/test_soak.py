"""`make soak`: its faults follow the seed, and its figures count what no fault explains."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from benchmarks.soak.__main__ import INJECTIONS
from benchmarks.soak.plan import KINDS, Outcome, faults, figures


def test_equal_seeds_give_equal_faults() -> None:
    one, same, other = (list(islice(faults(seed, 3), 50)) for seed in (7, 7, 8))
    assert one == same != other


def test_a_long_soak_has_every_kind_of_fault() -> None:
    found = list(islice(faults(1, 3), 500))
    assert {fault.kind for fault in found} == set(KINDS)
    assert {fault.worker for fault in found} == {0, 1, 2}


def test_every_kind_of_fault_can_be_injected() -> None:
    assert set(INJECTIONS) == {kind.name for kind in KINDS}


def test_rounds_that_no_fault_explains_are_counted() -> None:
    """A store that is away costs no round, and a killed sidecar may cost one."""
    calm = Outcome(0, rounds=1, faults=Counter({"sidecar killed": 2, "store away": 3}))
    double = Outcome(1, rounds=4, faults=Counter({"rank killed": 2, "store away": 3}))
    assert (calm.double, double.double) == (0, 2)
    by_id = {figure.id: figure for figure in figures([calm, double], 5, 1.0)}
    assert (by_id["C4-double"].value, by_id["C4-double"].ok) == (2, False)
    assert (by_id["C4-lost"].value, by_id["C4-lost"].ok) == (0, True)
    assert by_id["C4-rounds"].value == 5


def test_a_violation_of_the_oracle_misses_the_target() -> None:
    broken = Outcome(0, problems=["I2: rank 1 ended with nothing"])
    (lost, *_) = figures([broken], 5, 1.0)
    assert (lost.id, lost.value, lost.ok) == ("C4-lost", 1, False)
    assert lost.details["problems"] == ["I2: rank 1 ended with nothing"]
