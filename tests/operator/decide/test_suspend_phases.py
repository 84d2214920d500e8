"""A job with an object store is suspended in every phase, twice, and by operators that die after each write.

Each phase is a function that brings a new job into it. The suspension must save what can be saved, delete all
pods, and leave the newest committed step in the store, from which the job resumes.
"""

from __future__ import annotations

import pytest
from tests.support.operator.life import Life, after_each_death
from tests.support.operator.oracle import broken_rules
from tests.support.operator.phases import PHASES, Phase, heal, restart_unschedulable

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_core.ids import CheckpointId
from holdfast_operator.model.reasons import Reason


def is_suspended(status: TrainingJobStatus) -> bool:
    return status.is_true(JobCondition.SUSPENDED)


def is_suspended_with_everything_saved(life: Life, newest: CheckpointId | None) -> None:
    """Assert that the suspension ends, with no pod left and the newest commit in the store."""
    life.run(90, until=is_suspended)
    life.run(5)
    assert is_suspended(life.status)
    assert life.cluster.pods == {}
    assert life.status.phase == "Suspended"
    last = life.status.last_persisted
    if newest is not None:
        assert last.step >= newest.step
    assert broken_rules(life.cluster, life.copies) == []


def resumes_from_what_was_saved(life: Life) -> None:
    """Assert that the job trains again from the checkpoint that the suspension left in the store."""
    saved = life.status.last_persisted
    life.change_spec(suspend=False)
    life.run(30, until=lambda s: s.is_true(JobCondition.RUNNING))
    assert life.status.is_true(JobCondition.RUNNING)
    point = life.status.restore_point
    assert point is not None
    if saved is None:
        assert point.step is None
    else:
        assert (point.id, life.status.lineage[-1].base_manifest) == (saved.id, saved.manifest)
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A job is suspended in each phase, and a second time")
@pytest.mark.fault("A job is suspended while its pods are unschedulable")
@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.__name__)
def test_a_job_is_suspended_in_this_phase_twice(phase: Phase) -> None:
    life = Life(store=True)
    phase(life)
    newest = life.cluster.newest_commit() if life.cluster.choices else None
    life.change_spec(suspend=True)
    if phase is restart_unschedulable:
        life.run(10)
        assert life.nothing_was_deleted(), "the pods that are left have the newest step"
        heal(life)
    is_suspended_with_everything_saved(life, newest)
    heal(life)
    resumes_from_what_was_saved(life)
    life.run(7)
    newest = life.cluster.newest_commit()
    life.change_spec(suspend=True)
    is_suspended_with_everything_saved(life, newest)
    resumes_from_what_was_saved(life)


@pytest.mark.fault("The operator dies after each write of a suspension, in each phase")
@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.__name__)
def test_an_operator_that_dies_while_it_suspends_is_replaced(phase: Phase) -> None:
    begun = Life(store=True)
    phase(begun)
    newest = begun.cluster.newest_commit() if begun.cluster.choices else None
    heal(begun)
    begun.change_spec(suspend=True)
    for life in after_each_death(begun, seconds=40):
        is_suspended_with_everything_saved(life, newest)
        resumes_from_what_was_saved(life)


@pytest.mark.fault("A job is suspended while a lost pod finds no node")
def test_a_gang_that_cannot_recover_says_what_its_suspension_waits_for() -> None:
    life = Life(store=True)
    restart_unschedulable(life)
    life.change_spec(suspend=True)
    life.run(15)
    held, running = (
        life.status.condition(kind) for kind in (JobCondition.SUSPENDED, JobCondition.RUNNING)
    )
    assert (held.status, held.reason) == ("False", Reason.NOT_PERSISTED)
    assert "Delete its pods to give up the steps" in held.message
    assert running.reason == Reason.WAITING_FOR_PODS
    assert "0/6 nodes are available" in running.message


@pytest.mark.fault("A user deletes the pods of a job that waits for its suspension")
def test_a_user_who_deletes_the_pods_gives_up_what_only_they_have() -> None:
    life = Life(store=True, every=10)
    restart_unschedulable(life)
    saved = life.status.last_persisted
    assert saved is not None
    life.change_spec(suspend=True)
    life.run(3)
    for name, pod in list(life.cluster.pods.items()):
        life.cluster.delete_pod(name, pod.view.uid, force=False)
    life.run(20)
    assert is_suspended(life.status)
    assert life.cluster.pods == {}
    heal(life)
    resumes_from_what_was_saved(life)
