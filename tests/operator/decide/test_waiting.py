"""A waiting job reports its reason, writes its status once, and has passes at growing intervals."""

from __future__ import annotations

import pytest
from tests.support.operator.life import Life

from holdfast_core.api import JobCondition
from holdfast_operator.decide.facts.world import LONGEST_PAUSE_SECONDS
from holdfast_operator.kube.api import ApiError
from holdfast_operator.model.reasons import Reason

QUOTA = "exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2"


def running(life: Life) -> tuple[str, str, str]:
    return life.condition(JobCondition.RUNNING)


@pytest.mark.fault("The API server refuses to create a pod in the first round")
def test_a_refused_create_reaches_the_condition_and_one_event() -> None:
    life = Life()
    life.cluster.pod_refusal = QUOTA
    life.run(60)
    status, reason, message = running(life)
    assert (status, reason) == ("False", Reason.CREATE_REFUSED)
    assert QUOTA in message
    assert message.startswith("create Pod ")
    events = [e for e in life.operator.events if e.reason == Reason.CREATE_REFUSED]
    assert len(events) == 1
    assert QUOTA in events[0].message
    life.cluster.pod_refusal = ""
    life.run(30)
    assert life.status.is_true("Running")


@pytest.mark.fault("The API server refuses to create a pod in a recovery")
def test_a_refused_create_during_a_recovery_is_reported() -> None:
    life = Life().trained()
    life.cluster.pod_refusal = QUOTA
    life.cluster.lose_pod(life.pod(1))
    life.run(30)
    assert running(life)[:2] == ("False", Reason.CREATE_REFUSED)
    life.cluster.pod_refusal = ""
    life.run(60)
    assert life.status.is_true("Running")


@pytest.mark.fault("The API server refuses the record of a commit (quota, admission)")
def test_a_checkpoint_that_cannot_be_recorded_is_reported_until_it_is() -> None:
    """Without its record no later commit is recorded, none is pruned, and the job does not end."""
    life = Life(store=True, every=5, total_steps=60)
    quota = "exceeded quota: team, requested: count/checkpoints.holdfast.dev=1"
    life.cluster.api.refuse["POST", "checkpoints"] = ApiError(403, "Forbidden", quota)
    life.run(120)
    found = life.status.condition(JobCondition.REMOTE_TIER_HEALTHY)
    assert (found.status, found.reason) == ("False", Reason.CREATE_REFUSED)
    assert quota in found.message
    assert [e.reason for e in life.operator.events].count(Reason.CREATE_REFUSED) == 1
    assert not life.status.is_true(JobCondition.COMPLETE)
    life.cluster.api.refuse.clear()
    life.run(60)
    assert life.status.is_true(JobCondition.REMOTE_TIER_HEALTHY)
    assert life.status.is_true(JobCondition.COMPLETE)


def refused(life: Life) -> None:
    life.cluster.pod_refusal = QUOTA


def unschedulable(life: Life) -> None:
    for node in life.cluster.nodes.values():
        node.silent_ticks = 1
        node.cut_off = True


def silent(life: Life) -> None:
    life.silence()


@pytest.mark.fault("A job that waits has nothing new to report")
@pytest.mark.fault("The pass of a job fails again and again")
@pytest.mark.parametrize("why", [refused, unschedulable, silent], ids=lambda f: f.__name__)
def test_a_waiting_job_writes_nothing_when_only_the_clock_moves(why: object) -> None:
    life = Life()
    assert callable(why)
    why(life)
    life.run(120)
    written = len(life.cluster.statuses)
    passes = len(life.operator.decisions)
    life.run(600, each_second=True)
    assert len(life.operator.decisions) - passes == 600
    assert len(life.cluster.statuses) == written
    assert life.operator.decisions[-1].requeue_after_seconds == LONGEST_PAUSE_SECONDS


@pytest.mark.fault("A back-off begins before the first looks at a round")
def test_the_first_looks_at_a_round_are_quick() -> None:
    life = Life()
    life.run(1)
    life.run(3)
    pauses = [d.requeue_after_seconds for d in life.operator.decisions]
    assert all(p is not None and p <= 0.5 for p in pauses)
