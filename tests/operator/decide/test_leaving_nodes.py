"""When the pod of a node that will be taken away soon is deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    condition,
    job,
    now,
    pod,
    sidecar,
    status,
    store,
    template,
    world_of,
)
from tests.support.operator.decisions import of_kind

from holdfast_core.api import (
    FailureAction,
    FailureReason,
    FailureRule,
    JobCondition,
    ReachedQuota,
    RestorePointStatus,
    TrainingJob,
    changed,
)
from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.nodes import why_pods_stay
from holdfast_operator.model.actions import Delete, EmitEvent, WriteStatus
from holdfast_operator.model.job import (
    JobMemory,
    NodeView,
    Observed,
    PodPhase,
    PodView,
    Seen,
    Taint,
)
from holdfast_operator.model.reasons import Reason

SPOT = Taint("example.com/spot-notice", "NoSchedule")
DEAD = (DeadRank(Rank(0), Worker(0), 1, "boom"),)


def training(*pods: PodView, of: TrainingJob | None = None, **state: Any) -> Observed:
    """Return a gang of three workers that trains. The nodes of workers 1 and 2 will be taken away."""
    begun = status(0, (0, 0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0))
    begun = begun.with_condition(JobCondition.RUNNING, True, Reason.TRAINING, "", now().utc, 1)
    changes = {p.worker: p for p in pods}
    pods = tuple(changes.get(Worker(w), pod(w)) for w in range(3))
    one = job(3) if of is None else of
    return Observed(
        job=changed(one, status=begun),
        pods=pods,
        sidecars=tuple(sidecar(p, 0, version=1) for p in pods),
        nodes={
            f"node-{w}": NodeView(f"node-{w}", leaving_taints=frozenset({SPOT} if w else ()))
            for w in range(3)
        },
        coordinator=CoordinatorState(5, RestartRound(0), **{"running": True, **state}),
        memory=JobMemory(round=RestartRound(0), round_seen_at=900.0),
    )


def deleted(observed: Observed) -> list[str]:
    return [a.name for a in of_kind(decide(observed, now(1000)).actions, "delete Pod")]


@pytest.mark.fault("A job ends while a node of its gang will be taken away")
def test_no_worker_of_a_job_that_has_failed_is_on_a_node_that_leaves() -> None:
    (written,) = of_kind(decide(training(), now(1000)).actions, WriteStatus)
    assert written.status.is_true(JobCondition.NODES_LEAVING)
    late = job(3, changed(written.status, start_time=START), active_deadline_seconds=10)
    observed = replace(training(), job=late)
    (written,) = of_kind(decide(observed, now(1000)).actions, WriteStatus)
    assert written.status.is_true(JobCondition.FAILED)
    assert not written.status.is_true(JobCondition.NODES_LEAVING)


def test_without_copies_a_pod_is_deleted_if_its_last_step_goes_to_the_object_store() -> None:
    assert deleted(training(of=job(3, peer_copies=0))) == []
    with_store = replace(training(of=job(3, peer_copies=0, store="main")), store=store())
    assert deleted(with_store) == [pod(1).name]


@pytest.mark.fault(
    "A node leaves while the job has no copies on peers and its store is down or full"
)
@pytest.mark.parametrize(
    ("healthy", "reached", "why"),
    [
        (False, (), "the object store is away: no answer"),
        (True, (ReachedQuota(bytes=3, limit_bytes=2),), "uploads wait for a quota"),
    ],
)
def test_without_copies_a_pod_stays_while_nothing_is_uploaded(
    healthy: bool, reached: tuple[ReachedQuota, ...], why: str
) -> None:
    observed = training(of=job(3, peer_copies=0, store="main"))
    store_is = condition(JobCondition.REMOTE_TIER_HEALTHY, healthy, "R", "no answer")
    status = changed(observed.job.status, conditions=(*observed.job.status.conditions, store_is))
    observed = replace(
        observed,
        job=changed(observed.job, status=status),
        store=replace(store(), reached_quotas=reached),
    )
    assert deleted(observed) == []
    assert why in str(why_pods_stay(world_of(observed)))


def test_one_pod_is_deleted_gracefully_and_an_event_says_why() -> None:
    actions = decide(training(), now(1000)).actions
    assert of_kind(actions, "delete Pod") == [
        Delete("Pod", pod(1).name, pod(1).uid, "", force=False)
    ]
    texts = [a.message for a in actions if isinstance(a, EmitEvent)]
    assert any(pod(1).name in t and SPOT.key in t and "is deleted" in t for t in texts)


@pytest.mark.fault("A node is tainted while another pod does not train")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"terminating": True}, id="it is being deleted already"),
        pytest.param({"disrupted": True}, id="it is being evicted"),
        pytest.param({"ready": False}, id="its ranks do not train yet"),
        pytest.param({"phase": PodPhase.PENDING, "ready": False}, id="it has not started"),
    ],
)
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_no_pod_is_deleted_while_another_one_does_not_train(
    changes: dict[str, Any], worker: int
) -> None:
    assert deleted(training(replace(pod(worker), **changes))) == []


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"running": False}, id="the ranks restore"),
        pytest.param({"finished": True}, id="the ranks have returned"),
        pytest.param({"dead": DEAD}, id="a rank has failed"),
    ],
)
def test_no_pod_is_deleted_while_the_gang_does_not_train(state: dict[str, Any]) -> None:
    assert pod(1).name not in deleted(training(**state))


@pytest.mark.fault("A pod of a tainted node tolerates the taint")
@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        (("", ""), True),
        ((SPOT.key, ""), True),
        ((SPOT.key, "NoSchedule"), True),
        (("", "NoSchedule"), True),
        ((SPOT.key, "NoExecute"), False),
        (("example.com/gpu", ""), False),
    ],
)
def test_a_pod_stays_exactly_if_it_tolerates_the_taint(
    toleration: tuple[str, str], stays: bool
) -> None:
    tolerant = replace(pod(1), tolerations=frozenset({toleration}))
    assert deleted(training(tolerant)) == [pod(2).name if stays else pod(1).name]


LOST = (FailureReason.NODE_LOST, FailureReason.POD_LOST)
FAIL = FailureRule(on_reasons=LOST, action=FailureAction.FAIL_JOB)
RESTART = FailureRule(on_reasons=LOST, action=FailureAction.RESTART_GANG)


@pytest.mark.parametrize(
    ("rules", "stays"),
    [
        pytest.param((FAIL,), True, id="it fails the job"),
        pytest.param((FAIL, RESTART), True, id="it fails the job before another rule applies"),
        pytest.param((RESTART, FAIL), False, id="another rule applies before"),
        pytest.param(
            (FailureRule(on_exit_codes=(1,), action=FailureAction.FAIL_JOB),),
            False,
            id="it is about exit codes",
        ),
        pytest.param(
            (FailureRule(on_reasons=(FailureReason.POD_EVICTED,), action=FailureAction.FAIL_JOB),),
            False,
            id="it is about evictions",
        ),
    ],
)
def test_a_rule_that_fails_the_job_after_the_deletion_keeps_the_pods(
    rules: tuple[FailureRule, ...], stays: bool
) -> None:
    observed = training(of=job(3, rules=rules))
    assert deleted(observed) == ([] if stays else [pod(1).name])
    text = why_pods_stay(world_of(observed))
    assert (text is not None and "failurePolicy.rules[0] fails the job" in text) is stays


def test_a_job_that_would_fail_after_the_deletion_trains_on() -> None:
    """The pods of such a job stay, and the job does not fail."""
    actions = decide(training(of=job(3, rules=(FAIL,))), now(1000)).actions
    written = [a.status for a in actions if isinstance(a, WriteStatus)]
    shown = [s.condition(JobCondition.NODES_LEAVING) for s in written]
    assert [c.reason for c in shown if c is not None] == [Reason.NODE_LEAVING_POD_STAYS]
    assert all(s.is_true(JobCondition.RUNNING) for s in written)


def test_a_suspended_job_and_one_whose_node_is_chosen_by_the_template_keep_their_pods() -> None:
    one = job(3)
    fixed = template()
    fixed["spec"]["nodeName"] = "node-1"
    assert deleted(training(of=changed(one, spec=changed(one.spec, template=fixed)))) == []
    assert deleted(training(of=changed(one, spec=changed(one.spec, suspend=True)))) == []


def test_the_restart_says_that_the_node_will_be_taken_away() -> None:
    gone = replace(pod(1), terminating=True, trainer_exit_code=0)
    memory = JobMemory(
        round=RestartRound(0),
        round_seen_at=900.0,
        seen={(Seen.LEAVING, gone.uid): 0.0},
        failure_seen_at=1.0,
    )
    observed = replace(training(gone), memory=memory)
    texts = [a.message for a in decide(observed, now(1000)).actions if isinstance(a, EmitEvent)]
    assert any(f"node {gone.node} has the taint {SPOT.key}" in t for t in texts), texts
