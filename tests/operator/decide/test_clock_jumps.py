"""A wall clock that jumps neither ends a job nor keeps old failures."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.support.operator.builders import START, job, now, status, world_of
from tests.support.operator.decisions import of_kind

from holdfast_core.api import JobCondition, RestartRecord, RestorePointStatus, TrainingJob
from holdfast_core.ids import RestartRound, Step
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.evidence import counted
from holdfast_operator.model.actions import WriteStatus
from holdfast_operator.model.job import JobMemory, Now, Observed

TWO_DAYS = timedelta(days=2)


def jumped(by: timedelta) -> Now:
    """Return the moment 1000 s after START, after a jump of the wall clock."""
    moment = now()
    return replace(moment, utc=moment.utc + by, jumped=by)


def with_deadline() -> TrainingJob:
    begun = status(1, (0, 0), start_time=START)
    return job(2, begun, active_deadline_seconds=3600)


def fails(moment: Now) -> bool:
    observed = Observed(
        job=with_deadline(), memory=JobMemory(round=RestartRound(1), round_seen_at=0.0)
    )
    writes = [a for a in decide(observed, moment).actions if isinstance(a, WriteStatus)]
    return any(w.status.is_true(JobCondition.FAILED) for w in writes)


@pytest.mark.fault("The wall clock of the operator's node jumps")
def test_a_jump_of_the_wall_clock_does_not_end_a_job_with_a_deadline() -> None:
    assert not fails(jumped(TWO_DAYS))
    assert not fails(jumped(-TWO_DAYS))
    later = now(3700.0)
    assert fails(later)
    assert fails(replace(later, utc=later.utc + TWO_DAYS, jumped=TWO_DAYS))


@pytest.mark.parametrize(("moment", "goes"), [(jumped(TWO_DAYS), False), (now(3700.0), True)])
def test_a_jump_does_not_delete_a_finished_job(moment: Now, goes: bool) -> None:
    ended = status(1, (0, 0), start_time=START, completion_time=START)
    ended = ended.with_condition(JobCondition.COMPLETE, True, "Completed", "", START)
    observed = Observed(job=job(2, ended, ttl_seconds_after_finished=3600))
    actions = decide(observed, moment).actions
    assert bool(of_kind(actions, "delete TrainingJob")) == goes


def test_restarts_with_a_stamp_of_the_future_do_not_count() -> None:
    ages = (-TWO_DAYS, timedelta(minutes=-1), timedelta(minutes=30), TWO_DAYS)
    records = tuple(
        RestartRecord(round=RestartRound(n), at=now().utc - age) for n, age in enumerate(ages)
    )
    point = RestorePointStatus(step=Step(50), round=RestartRound(8))
    known = status(
        9, (0, 0), recent_restarts=records, last_committed_step=Step(50), restore_point=point
    )
    world = world_of(Observed(job=job(2, known)))
    assert [r.round for r in counted(records, world)] == [1, 2]
