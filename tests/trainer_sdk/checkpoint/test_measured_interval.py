"""An interval that is given as a time becomes a number of steps by measured durations."""

from __future__ import annotations

import math

import pytest

from holdfast.checkpoint.decisions import Schedule
from holdfast.checkpoint.measured_interval import MeasuredInterval, daly_seconds
from holdfast_core.messages.schema import Interval, Timing


class Steps:
    """Steps of known duration on a clock of the test's own."""

    def __init__(self, seconds: float | None, mtbf_seconds: float = 21_600.0) -> None:
        self.measured = MeasuredInterval(Timing(seconds, mtbf_seconds))
        self._now = 0.0
        self._blocked = 0.0
        self.measured.begin(self._now, self._blocked)

    def do(self, count: int, each_seconds: float, *, save_seconds: float = 0.0) -> None:
        for _ in range(count):
            self._now += each_seconds + save_seconds
            self._blocked += save_seconds
            self.measured.step_done(self._now, self._blocked, saved=save_seconds > 0)


def test_the_first_step_does_not_count_and_two_more_suffice() -> None:
    steps = Steps(60.0)
    steps.do(1, 30.0)
    steps.do(1, 0.5)
    assert steps.measured.wanted(0) is None
    steps.do(1, 0.5)
    assert steps.measured.wanted(0) == 120


def test_a_small_change_is_not_worth_an_agreement() -> None:
    steps = Steps(60.0)
    steps.do(9, 0.5)
    assert steps.measured.wanted(110) is None
    assert steps.measured.wanted(60) == 120
    assert steps.measured.wanted(200) == 120


def test_a_step_that_is_longer_than_the_interval_is_saved_each_time() -> None:
    steps = Steps(60.0)
    steps.do(9, 600.0)
    assert steps.measured.wanted(0) == 1
    assert steps.measured.wanted(1) is None


def test_time_in_saves_is_not_time_of_steps() -> None:
    steps = Steps(60.0)
    steps.do(9, 0.5, save_seconds=3.0)
    assert steps.measured.step_seconds == pytest.approx(0.5)


def test_one_long_pause_does_not_make_the_gang_save_every_step() -> None:
    steps = Steps(60.0)
    steps.do(1000, 0.5)
    steps.do(1, 3600.0)
    wanted = steps.measured.wanted(120)
    assert wanted is None or wanted > 60


def test_an_interval_follows_when_steps_become_slower() -> None:
    steps = Steps(60.0)
    steps.do(1000, 0.1)
    assert steps.measured.wanted(0) == 600
    steps.do(1000, 2.0)
    assert steps.measured.wanted(600) == 30


def test_the_interval_of_auto_is_the_optimum_for_the_measured_cost() -> None:
    steps = Steps(None, mtbf_seconds=7200.0)
    steps.do(3, 1.0)
    early = steps.measured.wanted(0)
    assert early == round(daly_seconds(0.1, 7200.0))
    steps.do(5, 1.0, save_seconds=4.0)
    assert (
        steps.measured.wanted(early) == 237
    )  # Young: sqrt(2 * 4 * 7200) = 240; Daly subtracts about 3
    assert steps.measured.report(237) == Interval(
        237, pytest.approx(237.3, abs=0.1), pytest.approx(1.0), pytest.approx(4.0), 7200.0
    )


def _loss(every: float, cost: float, mtbf: float) -> float:
    """Return the expected total time for one second of work, with failures at random (Daly 2006)."""
    return mtbf * (math.exp((every + cost) / mtbf) - 1) / every


@pytest.mark.parametrize(("cost", "mtbf"), [(0.05, 3600.0), (4.0, 7200.0), (120.0, 7200.0)])
def test_no_other_interval_costs_less_in_total(cost: float, mtbf: float) -> None:
    best = daly_seconds(cost, mtbf)
    for other in (best / 1.3, best * 1.3):
        assert _loss(best, cost, mtbf) < _loss(other, cost, mtbf)


def test_an_interval_is_never_longer_than_the_time_between_failures() -> None:
    assert daly_seconds(100_000.0, 60.0) == 60.0


def test_a_changed_interval_counts_from_the_last_save_that_was_due() -> None:
    first = Schedule(100, 0)
    assert first.next_due(101) is None
    by_ten = first.changed(103, 10)
    assert [by_ten.next_due(step) for step in (104, 110, 111)] == [110, 110, 120]
    by_four = by_ten.changed(115, 4)
    assert [by_four.next_due(step) for step in (116, 118, 119)] == [118, 118, 122]
    assert by_ten.changed(115, 100).next_due(116) == 210
