"""A training whose saves continue but do not become durable reports that once."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.status import StallCounter
from holdfast_core.ids import Step


def reports(watch: StallCounter, *times: float) -> list[float | None]:
    found = []
    for now in times:
        watch.saved(now)
        found.append(watch.stalled_seconds(now))
    return found


@pytest.mark.fault("Saves go on, and none becomes durable")
def test_a_stall_is_reported_once_until_a_save_becomes_durable() -> None:
    watch = StallCounter()
    assert reports(watch, 0, 20, 40, 60) == [None] * 4
    assert reports(watch, 80, 100, 120) == [80, None, None]
    assert watch.saves_since_commit == 7
    watch.committed(Step(7), 130)
    assert watch.saves_since_commit == 0
    assert reports(watch, 140, 160, 180, 185, 190) == [None, None, None, None, 60]


def test_many_saves_in_a_short_time_are_a_slow_disk() -> None:
    assert reports(StallCounter(), *(0.1 * i for i in range(100))) == [None] * 100


def test_a_long_interval_is_not_reported_as_a_stall() -> None:
    watch = StallCounter()
    for hour in range(10):
        assert reports(watch, 3600.0 * hour) == [None]
        watch.committed(Step(hour), 3600.0 * hour + 5)


def test_the_newest_step_counts_where_commits_come_late() -> None:
    watch = StallCounter()
    watch.committed(Step(20), 1)
    watch.committed(Step(10), 2)
    assert watch.last_committed == 20
