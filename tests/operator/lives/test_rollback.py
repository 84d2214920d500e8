"""A person rolls a job back: while it trains, while it waits, and while the operator dies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.operator.life import Life, after_each_death
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import TrainingJobStatus
from holdfast_core.ids import CheckpointId
from holdfast_operator.model.reasons import Reason

ROLLED_BACK = "RolledBack"


def training(*, every: int = 5) -> Life:
    """Return a gang that trains and has some steps in its store."""
    life = Life(store=True, every=every)
    life.run(60, until=lambda _: len(life.cluster.store.checkpoints) >= 4)
    assert life.status.is_true("Running")
    return life


def roll_back(life: Life, step: int) -> None:
    """Do what `kubectl holdfast restore JOB@STEP` does."""
    life.change_spec(rollback={"round": life.status.lineage[-1].round, "step": step})


def note(life: Life) -> tuple[str, str]:
    condition = life.status.condition(ROLLED_BACK)
    return condition.reason, condition.message


def trains_in(round_: int) -> Callable[[TrainingJobStatus], bool]:
    return lambda status: status.restart_round == round_ and status.is_true("Running")


def present(life: Life) -> list[CheckpointId]:
    """Return the Checkpoints of the job's present objects, oldest step first."""
    found = life.cluster.api.all("checkpoints")
    ids = [
        CheckpointId(raw["spec"]["step"], raw["status"]["round"])
        for raw in found
        if raw.get("status", {}).get("phase") == "Committed"
    ]
    return sorted(ids)


@pytest.mark.fault("A job is rolled back three times in a row while it trains")
def test_a_gang_that_trains_goes_back_three_times_in_a_row() -> None:
    life = training()
    first = present(life)[-3]
    reached = 0
    for round_ in (1, 2, 3):
        before = life.status.step
        assert before is not None
        reached = max(reached, before)
        roll_back(life, first.step)
        life.run(60, until=trains_in(round_))
        status = life.status
        assert life.cluster.choices[-1].status["restorePoint"]["step"] == first.step
        newest = status.lineage[-1]
        assert (newest.round, newest.base) == (round_, first)
        assert reached <= newest.rolled_back_from <= reached + 5
        assert status.is_true(ROLLED_BACK)
        record = status.last_recovery
        assert (record.reason, record.restored_step) == (Reason.ROLLED_BACK, first.step)
        life.run(3)
    assert life.status.restarts == 0, "it is no failure"
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A job is rolled back below its newest persisted step")
def test_smaller_steps_are_persisted_after_it_and_the_abandoned_ones_are_pruned() -> None:
    life = training()
    back, newest = present(life)[-3], present(life)[-1]
    roll_back(life, back.step)
    life.run(30, until=trains_in(1))
    assert newest in life.cluster.store.checkpoints, "it stays until the retention takes it"
    life.run(60, until=lambda s: s.last_persisted is not None and s.last_persisted.round == 1)
    last = life.status.last_persisted
    assert last is not None and back.step < last.step <= newest.step
    life.run(60)
    kept = present(life)
    assert newest not in kept
    assert all(id_.round == 1 or id_.step <= back.step for id_ in kept)
    assert len([id_ for id_ in kept if id_.round == 1]) >= 2
    assert broken_rules(life.cluster, life.copies) == []


def test_ranks_learn_the_step_that_was_reached_until_they_pass_it() -> None:
    life = training()
    back = present(life)[-2]
    roll_back(life, back.step)
    life.run(30, until=trains_in(1))
    reached = life.status.lineage[-1].rolled_back_from
    assert reached is not None

    def sent() -> set[int | None]:
        messages = (s.message for s in life.cluster.sidecars.values())
        return {None if m is None else m.rolled_back_from for m in messages}

    assert sent() == {reached}
    life.rank_dies()
    life.run(30, until=trains_in(2))
    assert sent() == {reached}, "an early restart is still below that step"
    life.run(60, until=lambda s: (s.last_replicated_step or 0) > reached)
    life.run_until_committed()
    life.rank_dies()
    life.run(30, until=trains_in(3))
    assert sent() == {None}
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("The operator dies at any write of a rollback")
def test_an_operator_that_dies_rolls_it_back_once() -> None:
    waiting = training()
    back = present(waiting)[-2]
    roll_back(waiting, back.step)
    for life in after_each_death(waiting, seconds=20):
        life.run(40)
        assert life.status.is_true("Running")
        starts = [c.status["restorePoint"].get("step") for c in life.cluster.choices[1:]]
        assert starts == [back.step]
        assert life.status.is_true(ROLLED_BACK)
        assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A job is rolled back while it is suspended, or while a rank fails")
def test_a_suspended_job_goes_back_when_it_resumes() -> None:
    life = training()
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true("Suspended"))
    back = present(life)[-2]
    roll_back(life, back.step)
    life.run(20)
    assert life.status.is_true("Suspended")
    assert note(life)[0] == Reason.ROLLING_BACK
    life.change_spec(suspend=False)
    life.recovers_from(back.step)
    assert life.status.is_true(ROLLED_BACK)


@pytest.mark.fault("A job is rolled back while it is suspended, or while a rank fails")
def test_a_round_that_a_failure_begins_carries_the_order_out() -> None:
    life = training()
    back = present(life)[-2]
    life.rank_dies()
    roll_back(life, back.step)
    life.recovers_from(back.step)
    assert len(life.cluster.choices) == 2
