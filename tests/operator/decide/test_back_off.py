"""A gang that fails repeatedly from the same step waits before each new round."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.support.operator.builders import START, job, metadata, now, pod, sidecar, status
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    FailureAction,
    FailureRule,
    LineageEntry,
    RestartRecord,
    RestorePointStatus,
    changed,
)
from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.failures import GATHER_SECONDS
from holdfast_operator.model.actions import BeginRound
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodPhase

ROUND = RestartRound(6)
BASE = RestorePointStatus(step=Step(10), round=RestartRound(1))


def failing(
    futile: int, *, committed: int | None = 10, trained: int | None = 12, **spec: object
) -> Observed:
    """Return a world in which rank 1 is dead in round 6, after `futile` counted restarts since the base's
    round. The ranks have finished step `trained`, or none."""
    records = tuple(
        RestartRecord(
            round=RestartRound(2 + i),
            at=START + timedelta(seconds=900),
        )
        for i in range(futile)
    )
    pods = (pod(0), pod(1))
    begun = status(
        ROUND,
        (0, 0),
        restore_point=BASE,
        recent_restarts=records,
        last_committed_step=None if committed is None else Step(committed),
        coordinator=Worker(0),
    )
    return Observed(
        job=job(2, begun, **spec),
        pods=pods,
        sidecars=tuple(sidecar(p, ROUND, version=1) for p in pods),
        nodes={f"node-{i}": NodeView(f"node-{i}") for i in range(2)},
        coordinator=CoordinatorState(
            5,
            ROUND,
            dead=(DeadRank(Rank(1), Worker(1), 1, "boom"),),
            progress=None if trained is None else progress_of(trained, trained),
        ),
        memory=JobMemory(round=ROUND, round_seen_at=900.0, failure_seen_at=1000.0),
    )


def begins(observed: Observed, seconds_after_failure: float) -> bool:
    decision = decide(observed, now(1000.0 + seconds_after_failure))
    return any(isinstance(a, BeginRound) for a in decision.actions)


@pytest.mark.parametrize(
    ("futile", "waits_seconds"),
    [
        pytest.param(0, 0.0, id="the first failure"),
        pytest.param(1, 0.0, id="the second"),
        pytest.param(2, 0.979, id="the third waits up to one second"),
        pytest.param(3, 1.958, id="then up to twice as long each time"),
        pytest.param(4, 3.917, id="the fifth waits up to four seconds"),
    ],
)
def test_each_futile_restart_waits_longer(futile: int, waits_seconds: float) -> None:
    observed = failing(futile)
    if waits_seconds:
        assert not begins(observed, waits_seconds - 0.002)
    assert begins(observed, waits_seconds + 0.002)


@pytest.mark.parametrize(
    ("futile", "waits_seconds"),
    [
        pytest.param(1, 0.0, id="the second"),
        pytest.param(2, 14.68, id="the third waits up to a quarter of a minute"),
        pytest.param(3, 29.37, id="then up to twice as long each time"),
        pytest.param(6, 234.98, id="up to minutes"),
        pytest.param(9, 587.46, id="at most ten minutes"),
    ],
)
def test_a_gang_that_never_reaches_its_first_step_waits_for_minutes(
    futile: int, waits_seconds: float
) -> None:
    """Something outside of it is away. A budget of ten restarts must not be spent within three minutes."""
    observed = failing(futile, trained=None)
    if waits_seconds:
        assert not begins(observed, waits_seconds - 0.1)
    assert begins(observed, waits_seconds + 0.1)


def test_the_wait_is_bounded() -> None:
    observed = failing(4)
    many = tuple(
        RestartRecord(round=RestartRound(2 + i), at=START + timedelta(seconds=900))
        for i in range(40)
    )
    begun = changed(observed.job.status, recent_restarts=many)
    observed = replace(observed, job=job(2, begun, max_restarts=100))
    assert not begins(observed, 58.7)
    assert begins(observed, 58.8)


def aged(observed: Observed, hours: int) -> Observed:
    """Return the world in which the restarts happened so many hours earlier."""
    known = observed.job.status
    records = tuple(changed(r, at=r.at - timedelta(hours=hours)) for r in known.recent_restarts)
    return with_status(observed, recent_restarts=records)


def with_status(observed: Observed, **fields: object) -> Observed:
    known = changed(observed.job.status, **fields)
    return replace(observed, job=changed(observed.job, status=known))


def without_a_point(observed: Observed) -> Observed:
    """Return the world in which a pod fails before the round has a restore point. Round 5 had one."""
    last = LineageEntry(round=RestartRound(5), base=CheckpointId(Step(10), RestartRound(1)))
    pods = (observed.pods[0], replace(observed.pods[1], phase=PodPhase.FAILED))
    found = replace(observed, pods=pods, coordinator=None)
    return with_status(found, restore_point=None, lineage=(last,))


OF_ANOTHER_JOB = RestorePointStatus(step=Step(10), round=RestartRound(40), job_uid=JobUid("other"))
NO_PROGRESS = {
    "the gang restores the same step each time": failing(4, trained=None, max_restarts=4),
    "no step was ever committed": with_status(
        failing(4, trained=None, max_restarts=4),
        restore_point=RestorePointStatus(),
        last_committed_step=None,
    ),
    "it restores a step of another job": with_status(
        failing(4, trained=None, max_restarts=4),
        restore_point=OF_ANOTHER_JOB,
        last_committed_step=None,
    ),
    "the round has no restore point yet": without_a_point(failing(4, trained=None, max_restarts=4)),
}
PROGRESS = {
    "a step was committed in this round": failing(4, committed=20, max_restarts=4),
    "a step was committed in the round before": with_status(
        failing(4, max_restarts=4), restore_point=changed(BASE, round=RestartRound(5))
    ),
    "it was committed in the last round that had a restore point": without_a_point(
        failing(4, committed=20, max_restarts=4)
    ),
}


@pytest.mark.parametrize("case", [*NO_PROGRESS, *PROGRESS])
def test_restarts_without_progress_count_outside_of_the_window(case: str) -> None:
    spent = case in NO_PROGRESS
    observed = NO_PROGRESS[case] if spent else PROGRESS[case]
    assert "more than 4 restarts" in decide(observed, now(1700.0)).reason, "within the window"
    decision = decide(aged(observed, hours=8), now(1700.0))
    assert ("more than 4 restarts" in decision.reason) == spent
    if not spent:
        [begun] = (a for a in decision.actions if isinstance(a, BeginRound))
        assert len(begun.status.recent_restarts) == 1, "older ones are dropped"


def test_old_restarts_without_progress_lengthen_the_wait() -> None:
    observed = aged(failing(4, trained=None), hours=8)
    assert not begins(observed, 58.6)
    assert begins(observed, 58.8)


def test_jobs_that_fail_together_wait_for_different_times() -> None:
    """The store that they all restore from would otherwise be asked by all of them at once."""
    observed = failing(4)
    other = metadata(observed.job, uid="22222222-2222-3333-4444-555555555555")
    assert not begins(observed, 2.2)
    assert begins(replace(observed, job=other), 2.2)


def test_progress_since_the_restore_point_ends_the_wait() -> None:
    assert begins(failing(4, committed=20), 0.0)


def test_a_disruption_waits_only_for_further_lost_pods() -> None:
    observed = failing(4)
    assert begins(replace(observed, pods=(pod(0),)), GATHER_SECONDS + 0.001)


def test_a_rule_that_ends_the_job_does_not_wait() -> None:
    rule = FailureRule(on_exit_codes=(1,), action=FailureAction.FAIL_JOB)
    decision = decide(failing(4, rules=(rule,)), now(1000.0))
    assert "FailJob" in decision.reason


def test_the_condition_shows_the_back_off() -> None:
    decision = decide(failing(4), now(1000.5))
    assert "the next round begins after 4 s" in decision.reason
    assert "boom" in decision.reason


def with_answers_at(observed: Observed, *answered_at: float | None) -> Observed:
    """Return the world with the times of the last answers of the sidecars of workers 0 and 1."""
    views = zip(observed.sidecars, answered_at, strict=True)
    return replace(observed, sidecars=tuple(replace(s, answered_at=at) for s, at in views))


@pytest.mark.parametrize(
    ("name", "answered_at", "after", "begun"),
    [
        ("both have answered since", (1000.1, 1000.1), 0.2, True),
        ("one has not", (1000.1, 999.0), 0.2, False),
        ("its lease had the time to stop, and has not", (1000.1, 999.0), 25.0, True),
        ("shortly before that", (1000.1, 999.0), 24.9, False),
        ("this process never received an answer", (1000.1, None), 0.2, True),
    ],
)
def test_failed_ranks_wait_for_a_sign_of_life_of_every_peer(
    name: str, answered_at: tuple[float, float | None], after: float, begun: bool
) -> None:
    assert begins(with_answers_at(failing(0), *answered_at), after) is begun, name


@pytest.mark.fault("A node is lost when the restart budget is spent")
def test_a_lost_node_spends_no_budget_that_its_peers_would_have_spent() -> None:
    """The ranks fail before the loss of the node is noticed. Their failure must not use the last restart
    of the budget."""
    observed = with_answers_at(failing(0, max_restarts=0), 1000.1, 999.0)
    decision = decide(observed, now(1005.0))
    assert "has not answered since" in decision.reason
    assert not any(isinstance(a, BeginRound) for a in decision.actions)
    assert not decide(observed, now(1000.5)).actions, "most answers need no status write"
