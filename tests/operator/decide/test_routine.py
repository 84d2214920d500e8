"""How soon a job that trains is looked at again without an event, in a cluster of many jobs."""

from __future__ import annotations

import pytest
from tests.support.operator.life import Life

from holdfast_operator.decide.decide import RUNNING_SECONDS
from holdfast_operator.loop import observe
from holdfast_operator.sidecars.state import JOBS_PER_SECOND, routine_seconds

MANY = 1000
SECONDS = routine_seconds(MANY)


@pytest.fixture(autouse=True)
def _many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "routine_seconds", lambda jobs: routine_seconds(MANY))


def trains() -> Life:
    return Life().trained()


def pauses(life: Life, seconds: int = 20) -> set[float | None]:
    before = len(life.operator.decisions)
    life.run(seconds)
    return {d.requeue_after_seconds for d in life.operator.decisions[before:]}


def test_each_job_gets_its_turn() -> None:
    assert routine_seconds(MANY) * JOBS_PER_SECOND == MANY
    assert routine_seconds(1) < RUNNING_SECONDS < SECONDS


def test_a_job_that_trains_undisturbed_waits_for_its_turn() -> None:
    assert pauses(trains()) == {SECONDS}


def test_a_job_with_a_silent_sidecar_is_looked_at_as_often_as_ever() -> None:
    """What follows becomes due with time alone: another coordinator, a lost node."""
    life = trains()
    life.silence(1)
    life.run(3)
    assert SECONDS not in pauses(life)


def test_the_deadline_is_met_although_nothing_happens() -> None:
    life = trains()
    life.change_spec(activeDeadlineSeconds=60)
    assert all(p is not None and p <= 31 for p in pauses(life, 5))


def test_steps_are_written_once_in_a_turn() -> None:
    life = trains()
    life.run(int(SECONDS))
    before = len(life.cluster.statuses)
    life.run(int(5 * SECONDS))
    assert 4 <= len(life.cluster.statuses) - before <= 6
