"""A straggler is shown in the status and by one Event, and nothing restarts because of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.operator.builders import condition, job, now, pod, sidecar, status
from tests.support.operator.decisions import of_kind
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    Detection,
    FailurePolicySpec,
    JobCondition,
    RestorePointStatus,
    StragglersSpec,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, Straggler
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import BeginRound, EmitEvent, EventKind, WriteStatus
from holdfast_operator.model.job import JobMemory, Observed
from holdfast_operator.model.reasons import Reason

CHOSEN = status(
    1,
    (0, 1),
    restore_point=RestorePointStatus(),
    coordinator=Worker(0),
    conditions=(condition(JobCondition.RUNNING, True, Reason.TRAINING),),
)
PROCS = 4
"""Ranks of a worker."""
SLOW = Straggler(Rank(5), 2.4, Step(120), "Input")
KNOWN = changed(CHOSEN, stragglers=(Rank(5),))
"""The status after the straggler was found."""


def observed(
    *stragglers: Straggler,
    before: TrainingJobStatus = CHOSEN,
    finished: int = 200,
) -> Observed:
    """Return a gang that trains, whose coordinator has found these stragglers.

    Args:
        finished: The newest step that all ranks have finished. They began the round at step 0.
    """
    pods = (pod(0, node="node-0"), pod(1, 1, node="node-1"))
    state = CoordinatorState(
        5, RestartRound(1), running=True, stragglers=stragglers, progress=progress_of(finished)
    )
    return Observed(
        job=job(2, before, procs_per_worker=PROCS),
        pods=pods,
        sidecars=tuple(sidecar(p, 1) for p in pods),
        coordinator=state,
        memory=JobMemory(round=RestartRound(1), round_seen_at=900.0, levels_written_at=999.0),
    )


def events(found: Observed) -> list[EmitEvent]:
    return [
        e
        for e in of_kind(decide(found, now()).actions, EmitEvent)
        if e.reason in (Reason.STRAGGLER, Reason.STRAGGLER_RECOVERED)
    ]


@pytest.mark.fault("A rank is slower than the others (its forward passes, its batches)")
def test_a_straggler_is_shown_at_once_and_changes_nothing_else() -> None:
    actions = decide(observed(SLOW), now()).actions
    (write,) = of_kind(actions, WriteStatus)
    assert write.status.stragglers == (5,)
    assert not of_kind(actions, BeginRound) and not of_kind(actions, "delete Pod")


@pytest.mark.fault(
    "The coordinator is silent, or the operator is another process, while a straggler is shown"
)
def test_a_straggler_has_one_event() -> None:
    (event,) = events(observed(SLOW))
    assert (event.kind, event.message) == (
        EventKind.WARNING,
        "rank 5 of worker 1 on node node-1 takes 2.4 times as long for its part of a step as the median, "
        "mostly for its input, since step 120",
    )
    slower = replace(SLOW, factor=3.0, slow_part="Forward")
    assert events(observed(SLOW, before=KNOWN)) == []
    assert events(observed(slower, before=KNOWN)) == []


def test_a_second_straggler_has_an_event_of_its_own() -> None:
    (event,) = events(observed(replace(SLOW, rank=Rank(2)), SLOW, before=KNOWN))
    assert event.message.startswith("rank 2 of worker 0 on node node-0 takes 2.4 times as long")


def test_a_changed_factor_causes_no_write() -> None:
    """Otherwise each pass over a job with a straggler would cause a write in etcd."""
    (write,) = of_kind(decide(observed(SLOW), now()).actions, WriteStatus)
    slower = observed(replace(SLOW, factor=3.0), before=write.status)
    assert of_kind(decide(slower, now()).actions, WriteStatus) == []


def test_a_rank_that_is_as_fast_again_is_no_longer_shown() -> None:
    found = observed(before=KNOWN)
    (event,) = events(found)
    assert (event.kind, event.reason) == (EventKind.NORMAL, Reason.STRAGGLER_RECOVERED)
    assert event.message == "rank 5 of worker 1 on node node-1 is no straggler any more"
    assert of_kind(decide(found, now()).actions, WriteStatus)[0].status.stragglers == ()


@pytest.mark.fault(
    "The coordinator is silent, or the operator is another process, while a straggler is shown"
)
def test_stragglers_stay_while_the_coordinator_is_silent() -> None:
    found = replace(observed(before=KNOWN), coordinator=None)
    (write,) = of_kind(decide(found, now(1100)).actions, WriteStatus)
    assert write.status.stragglers == (5,)


@pytest.mark.fault("The gang restarts while a rank is a straggler")
def test_a_restart_writes_no_second_event_about_the_same_straggler() -> None:
    """The ranks of the new round have not been measured, so that nothing shows that it is over."""
    dead = CoordinatorState(
        5, RestartRound(1), dead=(DeadRank(Rank(1), Worker(1), 1, "boom"),), stragglers=(SLOW,)
    )
    found = replace(observed(before=KNOWN), coordinator=dead)
    (begin,) = of_kind(decide(found, now()).actions, BeginRound)
    assert events(found) == []

    known = changed(CHOSEN, stragglers=begin.status.stragglers)
    starting = replace(observed(before=known), coordinator=None)
    assert events(starting) == []
    for finished in (1, 40, 61):
        assert events(observed(before=known, finished=finished)) == []
    again = replace(SLOW, since=Step(4))
    assert events(observed(again, before=known, finished=40)) == []
    (over,) = events(observed(before=known, finished=62))
    assert over.reason == Reason.STRAGGLER_RECOVERED


@pytest.mark.fault("The gang restarts while a rank is a straggler")
def test_a_straggler_in_a_new_pod_has_an_event_of_its_own() -> None:
    """A person who moved the pod has to see whether that helped."""
    found = observed(before=changed(CHOSEN, stragglers=(Rank(2), Rank(5))), finished=1)
    memory = replace(found.memory, failure_seen_at=900.0)
    lost = replace(found, pods=found.pods[:1], sidecars=found.sidecars[:1], memory=memory)
    (begin,) = of_kind(decide(lost, now()).actions, BeginRound)
    assert begin.status.members == (0, 2)
    assert begin.status.stragglers == (2,)


def test_a_job_that_is_over_or_does_not_look_has_no_stragglers() -> None:
    known = observed(before=KNOWN, finished=1)
    off = FailurePolicySpec(stragglers=StragglersSpec(detection=Detection.OFF))
    job_off = changed(known.job, spec=changed(known.job.spec, failure_policy=off))
    suspended = changed(known.job, spec=changed(known.job.spec, suspend=True))
    for changed_job in (job_off, suspended):
        actions = decide(replace(known, job=changed_job), now()).actions
        (write,) = of_kind(actions, WriteStatus)
        assert write.status.stragglers == ()


def test_a_report_of_another_round_or_of_unknown_ranks_shows_nothing() -> None:
    late = observed(SLOW)
    assert late.coordinator is not None
    late = replace(late, coordinator=replace(late.coordinator, round=RestartRound(0)))
    assert events(late) == []
    assert events(observed(replace(SLOW, rank=Rank(2 * PROCS)))) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(StragglersSpec(), (1.5, 30), id="default"),
        pytest.param(StragglersSpec(factor=2.0, steps=5), (2.0, 5), id="both"),
        pytest.param(StragglersSpec(factor=3.0), (3.0, 30), id="one"),
        pytest.param(StragglersSpec(detection=Detection.OFF), (0.0, 0), id="off"),
    ],
)
def test_sidecars_get_the_limits_of_the_spec(
    spec: StragglersSpec, expected: tuple[float, int]
) -> None:
    found = observed()
    limited = changed(found.job.spec, failure_policy=FailurePolicySpec(stragglers=spec))
    found = replace(found, job=changed(found.job, spec=limited))
    policy = of_kind(decide(found, now()).actions, "call /v1/round")[0].message.message.policy
    assert (policy.straggler_factor, policy.straggler_steps) == expected
