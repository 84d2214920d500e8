"""A checkpoint in which a drill found damage is not restored any more, and the next older one is."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator.life import Life
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import Checkpoint, CheckpointCondition, JobCondition, merge_patch
from holdfast_core.clock import parse_stamp
from holdfast_core.ids import CheckpointId
from holdfast_operator.model.reasons import Reason

NOW = parse_stamp("2026-01-01T00:00:00Z")


def drilled(life: Life, checkpoint: CheckpointId, reason: str = "Damaged") -> dict[str, Any]:
    """Write what a drill found into the Checkpoint object, and return the object."""
    api = life.cluster.api
    for raw in api.all("checkpoints"):
        found = Checkpoint.from_dict(raw)
        if found.id == checkpoint:
            kind, intact = CheckpointCondition.VERIFIED, reason == "Intact"
            status = found.status.with_condition(kind, intact, reason, "the message", NOW)
            if not intact:
                quarantine = CheckpointCondition.QUARANTINED
                status = status.with_condition(quarantine, True, reason, "the message", NOW)
            raw["status"] = merge_patch(status)
            api.touch(raw)
            return raw
    raise AssertionError(f"no Checkpoint object records {checkpoint}")


def begun() -> tuple[Life, CheckpointId]:
    """Return a life that trains, and the newest of its checkpoints in the store."""
    life = Life(store=True, every=5).trained()
    life.run_until_committed(is_stored=True)
    life.run(3)
    newest = life.status.last_persisted
    return life, newest.id


@pytest.mark.fault("A drill finds damage in the object store")
def test_the_next_older_one_is_restored_after_the_loss_of_all_pods() -> None:
    life, bad = begun()
    life.lose_all_pods()
    drilled(life, bad)
    life.run(90)
    assert life.status.quarantined == (bad,)
    condition = life.status.condition(JobCondition.QUARANTINED)
    assert condition.is_true
    for text in (f"step {bad.step} of round {bad.round}: a drill found damage", "releasedSteps"):
        assert text in condition.message
    assert life.status.is_true("Running")
    assert life.cluster.choices[-1].status["restorePoint"]["step"] < bad.step
    assert broken_rules(life.cluster, life.copies) == []


def test_the_job_says_which_one_it_would_restore_instead_while_it_trains() -> None:
    life, bad = begun()
    older = max(c for c in life.cluster.gang.store.checkpoints if c.step < bad.step)
    run = life.cluster.gang.run
    run.interval = 1000
    drilled(life, bad)
    life.run(2)
    condition = life.status.condition(JobCondition.QUARANTINED)
    assert f"the job would restore step {older.step} of round {older.round}" in condition.message
    assert life.status.is_true("Running")


def test_an_intact_drill_of_a_repaired_checkpoint_ends_the_quarantine() -> None:
    life, bad = begun()
    drilled(life, bad)
    life.run(2)
    assert life.status.quarantined == (bad,)
    raw = drilled(life, bad, "Intact")
    life.run(5)
    assert life.status.quarantined == ()
    assert life.condition(JobCondition.QUARANTINED)[:2] == ("False", Reason.RELEASED)
    assert not Checkpoint.from_dict(raw).status.is_true(CheckpointCondition.QUARANTINED)


def test_a_released_step_is_restored_although_it_is_damaged() -> None:
    life, bad = begun()
    life.change_spec(failurePolicy={"releasedSteps": [bad.step], "maxRestarts": 1000})
    raw = drilled(life, bad)
    life.run(5)
    assert life.status.quarantined == ()
    assert not Checkpoint.from_dict(raw).status.is_true(CheckpointCondition.QUARANTINED)


@pytest.mark.fault("A drill finds damage in a checkpoint of a job that is over")
def test_the_mark_for_damage_stays_after_the_end_of_the_job() -> None:
    life, bad = begun()
    life.change_spec(activeDeadlineSeconds=1)
    life.run(60, until=lambda s: s.completion_time is not None)
    assert life.status.completion_time is not None
    raw = drilled(life, bad)
    life.run(30)
    mark = Checkpoint.from_dict(raw).status.condition(CheckpointCondition.QUARANTINED)
    assert (mark.is_true, mark.reason) == (True, Reason.DAMAGED)


@pytest.mark.fault("Every checkpoint in the object store is damaged")
def test_no_rule_is_broken_when_every_stored_checkpoint_is_damaged() -> None:
    life, _ = begun()
    for raw in life.cluster.api.all("checkpoints"):
        found = Checkpoint.from_dict(raw).id
        assert found is not None
        drilled(life, found)
    life.run(5)
    condition = life.status.condition(JobCondition.QUARANTINED)
    assert "no other checkpoint is left to restore" in condition.message
    life.run(60)
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("Every checkpoint in the object store is damaged, and all pods are lost")
def test_a_job_whose_checkpoints_are_all_damaged_waits_for_a_person() -> None:
    """It does not fail: what a drill found says nothing about the script, and bytes may be repaired."""
    life, bad = begun()
    for raw in life.cluster.api.all("checkpoints"):
        found = Checkpoint.from_dict(raw).id
        assert found is not None
        drilled(life, found)
    life.lose_all_pods()
    life.run(120)
    lost = life.status.condition(JobCondition.CHECKPOINTS_LOST)
    assert lost.is_true
    for text in ("a drill found damage in it", f"Step {bad.step} is quarantined", "--from-start"):
        assert text in lost.message
    life.change_spec(failurePolicy={"releasedSteps": [bad.step], "maxRestarts": 1000})
    life.run(120)
    assert life.status.is_true("Running")
    assert life.cluster.choices[-1].status["restorePoint"]["step"] == bad.step


@pytest.mark.fault("A drill finds damage in a checkpoint of a job that is suspended")
def test_a_suspended_job_resumes_from_the_next_older_one() -> None:
    life, _ = begun()
    life.change_spec(suspend=True)
    life.run(60)
    assert life.status.is_true(JobCondition.SUSPENDED)
    newest = life.status.last_persisted
    assert newest is not None
    older = max(c for c in life.cluster.gang.store.checkpoints if c.step < newest.step)
    drilled(life, newest.id)
    life.run(10)
    life.change_spec(suspend=False)
    life.run(90)
    assert life.status.is_true("Running")
    assert life.status.quarantined == (newest.id,)
    assert life.cluster.choices[-1].status["restorePoint"]["step"] == older.step
    assert broken_rules(life.cluster, life.copies) == []
