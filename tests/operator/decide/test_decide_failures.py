"""What counts as a failure, what it costs, and how the next round begins."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    condition,
    job,
    now,
    pod,
    sidecar,
    silent,
    status,
    world_of,
)
from tests.support.operator.decisions import begun, counting, does
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    JobCondition,
    RestartRecord,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, RestorePoint
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.ends import COORDINATOR_ANSWER_SECONDS, KUBELET_SECONDS
from holdfast_operator.decide.gang import round_message
from holdfast_operator.model.actions import BeginRound, EmitEvent, WriteStatus
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodPhase, PodView
from holdfast_operator.model.reasons import Reason


def running_status(**changes: Any) -> TrainingJobStatus:
    true = condition(JobCondition.RUNNING, True, Reason.TRAINING, "", START)
    base = status(
        3, (0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0), conditions=(true,)
    )
    return changed(base, **changes)


def state(**changes: Any) -> CoordinatorState:
    base = CoordinatorState(
        version=5,
        round=RestartRound(3),
        running=True,
        progress=progress_of(42, 42),
        last_local=RestorePoint(Step(40), RestartRound(3)),
    )
    return replace(base, **changes)


def world(**changes: Any) -> Observed:
    pods = changes.pop("pods", (pod(0), pod(1)))
    spec = changes.pop("spec", {})
    base = Observed(
        job=job(2, changes.pop("status", running_status()), **spec),
        pods=pods,
        sidecars=tuple(sidecar(p, 3, version=1) for p in pods),
        nodes={f"node-{i}": NodeView(f"node-{i}") for i in range(2)},
        coordinator=state(),
        # The failure was seen a second ago: the wait for further lost pods is over.
        memory=JobMemory(round=RestartRound(3), round_seen_at=900.0, failure_seen_at=999.0),
    )
    return replace(base, **changes)


def test_a_healthy_gang_begins_no_round() -> None:
    decision = decide(world(), now())
    assert not any(isinstance(a, BeginRound) for a in decision.actions)


DEAD = (DeadRank(Rank(1), Worker(1), 1, "boom"),)
KILLED = (DeadRank(Rank(1), Worker(1), -9, ""),)
REPLICATED = RestorePoint(Step(40), RestartRound(3))
COPIED = {"coordinator": state(last_replicated=REPLICATED)}
"""The newest save of the round is replicated."""
LOST_NODE = {
    "node-0": NodeView("node-0"),
    "node-1": NodeView("node-1", lost_because="is gone", is_silent=True),
}
TAINTED_NODE = {"node-1": NodeView("node-1", lost_because="has a taint")}
SILENT_1 = (sidecar(pod(0), 3, version=1), silent(pod(1), 900.0))


def test_silent_node_whose_sidecar_was_not_asked_yet_is_not_lost() -> None:
    """An operator that has just started has received no answer yet, which is not a sign of silence."""
    asked_nobody = (sidecar(pod(0), 3, version=1), silent(pod(1)))
    decision = decide(world(nodes=LOST_NODE, sidecars=asked_nobody), now())
    assert not any(isinstance(a, BeginRound) for a in decision.actions)


def test_pod_without_an_address_is_lost_with_its_node() -> None:
    stuck = pod(1, ip=None, phase=PodPhase.PENDING, ready=False)
    pods, sidecars = (pod(0), stuck), (sidecar(pod(0), 3, version=1),)
    observed = world(nodes=LOST_NODE, pods=pods, sidecars=sidecars, **COPIED)
    found = begun(decide(observed, now()))
    assert found.status.members == (0, 4)
    observed = world(nodes=TAINTED_NODE, pods=pods, sidecars=sidecars, **COPIED)
    decision = decide(observed, now())
    assert not any(isinstance(a, BeginRound) or does(a, "delete Pod") for a in decision.actions), (
        "its node may be not ready for a moment only"
    )


def evicted_for(message: str) -> PodView:
    return pod(1, phase=PodPhase.FAILED, reason="Evicted", message=message)


@pytest.mark.parametrize(
    ("changes", "reason", "members", "counts"),
    [
        pytest.param({"pods": (pod(0),)}, Reason.POD_LOST, (0, 4), 0, id="pod gone"),
        pytest.param(
            {"pods": (pod(0), pod(1, phase=PodPhase.FAILED, reason="Error"))},
            Reason.POD_FAILED,
            (0, 4),
            1,
            id="pod failed",
        ),
        pytest.param(
            {"pods": (pod(0), pod(1, phase=PodPhase.FAILED, reason="Evicted"))},
            Reason.POD_EVICTED,
            (0, 4),
            0,
            id="evicted by the kubelet",
        ),
        pytest.param(
            {
                "pods": (
                    pod(0),
                    evicted_for(
                        'Usage of EmptyDir volume "holdfast-node" exceeds the limit "20Gi". '
                    ),
                )
            },
            Reason.POD_FAILED,
            (0, 4),
            1,
            id="evicted because its volume exceeds its limit",
        ),
        pytest.param(
            {
                "pods": (
                    pod(0),
                    evicted_for(
                        'Container trainer exceeded its local ephemeral storage limit "1Gi". '
                    ),
                )
            },
            Reason.POD_FAILED,
            (0, 4),
            1,
            id="evicted because a container exceeds its limit",
        ),
        pytest.param(
            {"pods": (pod(0), evicted_for("The node was low on resource: ephemeral-storage. "))},
            Reason.POD_EVICTED,
            (0, 4),
            0,
            id="evicted for a shortage of the node",
        ),
        pytest.param(
            {"pods": (pod(0), pod(1, phase=PodPhase.FAILED, disrupted=True))},
            Reason.POD_EVICTED,
            (0, 4),
            0,
            id="DisruptionTarget",
        ),
        pytest.param(
            {"nodes": LOST_NODE, "sidecars": SILENT_1, **COPIED},
            Reason.NODE_LOST,
            (0, 4),
            0,
            id="node lost",
        ),
        pytest.param(
            {"nodes": LOST_NODE, "sidecars": SILENT_1},
            Reason.NODE_LOST,
            (0, 0),
            0,
            id="node lost, and it may hold the only copy",
        ),
        pytest.param({"coordinator": state(dead=DEAD)}, Reason.RANK_FAILED, (0, 0), 1, id="rank"),
        pytest.param(
            {"coordinator": state(dead=KILLED), "pods": (pod(0), pod(1, reason="OOMKilled"))},
            Reason.OOM_KILLED,
            (0, 0),
            1,
            id="rank of a container that ran out of memory",
        ),
        pytest.param(
            {"coordinator": state(dead=(replace(DEAD[0], out_of_memory="limit 4 MiB"),))},
            Reason.OOM_KILLED,
            (0, 0),
            1,
            id="rank of a container in which the kernel ended a process",
        ),
        pytest.param(
            {"coordinator": state(dead=DEAD), "pods": (pod(0), pod(1, reason="OOMKilled"))},
            Reason.RANK_FAILED,
            (0, 0),
            1,
            id="rank that failed by itself after its container once ran out of memory",
        ),
        pytest.param(
            {"coordinator": state(dead=DEAD), "pods": (pod(0),)},
            Reason.POD_LOST,
            (0, 4),
            0,
            id="a rank that dies with a lost pod does not count",
        ),
        pytest.param(
            {"pods": (pod(0), pod(1, trainer_restarts=3)), **COPIED},
            Reason.TRAINER_RESTARTING,
            (0, 4),
            1,
            id="trainer restarted three times",
        ),
        pytest.param(
            {"coordinator": state(cannot_restore="rank 1: no source", restore_may_succeed=True)},
            Reason.RESTORE_FAILED,
            (0, 0),
            0,
            id="cannot restore",
        ),
        pytest.param(
            {"sidecars": (sidecar(pod(0), 7), sidecar(pod(1), 3))},
            Reason.STATUS_BEHIND,
            (0, 0),
            0,
            id="a sidecar knows a higher round",
        ),
    ],
)
def test_failures(
    changes: dict[str, Any], reason: Reason, members: tuple[int, ...], counts: int
) -> None:
    action = begun(decide(world(**changes), now()))
    new = action.status
    expected = 8 if reason is Reason.STATUS_BEHIND else 4
    assert new.restart_round == expected
    assert new.members == tuple(expected if m == 4 else m for m in members)
    assert new.restore_point is None
    assert new.coordinator is None
    assert new.restarts == 1
    assert counting(new) == counts
    assert (new.last_recovery.reason, new.last_recovery.round) == (reason, expected)
    restarting = new.condition(JobCondition.RESTARTING)
    assert (restarting.status, restarting.reason) == ("True", reason)
    assert not new.is_true(JobCondition.RUNNING)
    assert new.phase == "Restarting"
    assert new.last_committed_step == 40
    assert new.step == 42


def test_the_event_of_a_restore_that_fails_is_one_line() -> None:
    """Each of many workers names each place that it has asked. The logs of the sidecars have all of that."""
    places = "; ".join(f"rank 0 at worker {w}: 404 /v1/shards/{'0' * 80}" for w in range(40))
    lines = (
        f"worker {w}: rank {w} in the object store: connection refused; {places}" for w in range(8)
    )
    changes: dict[str, Any] = {
        "coordinator": state(cannot_restore="\n".join(lines), restore_may_succeed=True)
    }
    decision = decide(world(**changes), now())
    [text] = [a.message for a in decision.actions if isinstance(a, EmitEvent)]
    assert "worker 0: rank 0 in the object store: connection refused" in text
    assert "\n" not in text
    assert len(text) < 250


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pods": (pod(0), pod(1, sidecar_restarts=4))}, id="sidecar restarted"),
        pytest.param({"pods": (pod(0), pod(1, phase=PodPhase.SUCCEEDED))}, id="one pod ended well"),
        pytest.param({"nodes": LOST_NODE}, id="node silent, sidecar answers"),
        pytest.param({"sidecars": SILENT_1}, id="sidecar silent while training runs"),
        pytest.param({"pods": (pod(0), pod(1, trainer_restarts=2)), **COPIED}, id="two restarts"),
        pytest.param(
            {"pods": (pod(0), pod(1, trainer_restarts=3))}, id="restarts where the only copy is"
        ),
        pytest.param(
            {"coordinator": state(dead=DEAD, round=RestartRound(2))}, id="dead in an older round"
        ),
        pytest.param(
            {"pods": (pod(0), pod(1, phase=PodPhase.PENDING, waiting_reason="ErrImagePull"))},
            id="image cannot be pulled",
        ),
    ],
)
def test_these_observations_begin_no_round(changes: dict[str, Any]) -> None:
    decision = decide(world(**changes), now())
    assert not any(isinstance(a, BeginRound) for a in decision.actions), decision.reason


def test_a_pod_that_was_evicted_keeps_this_reason_when_it_is_gone() -> None:
    """The gang saves while the pod leaves, so that a round often begins only after its end."""
    leaving = pod(1, terminating=True, disrupted=True, reason="EvictionByEvictionAPI")
    drains = decide(world(pods=(pod(0), leaving)), now())
    assert not any(isinstance(a, BeginRound) for a in drains.actions)
    gone = world(pods=(pod(0),), memory=replace(drains.memory, failure_seen_at=999.0))
    found = begun(decide(gone, now()))
    assert found.confirm_gone == ("job-l2msg4-1-r0",)
    restarting = found.status.condition(JobCondition.RESTARTING)
    assert restarting.reason == "PodEvicted"
    assert "pod job-l2msg4-1-r0: EvictionByEvictionAPI" in restarting.message


@pytest.mark.parametrize(("seconds", "begins"), [(59.0, False), (60.0, True)])
def test_a_pod_that_succeeds_while_its_gang_goes_on_fails_after_a_time(
    seconds: float, begins: bool
) -> None:
    early = pod(1, phase=PodPhase.SUCCEEDED, trainer_exit_code=0)
    first = decide(world(pods=(pod(0), early)), now())
    found = decide(world(pods=(pod(0), early), memory=first.memory), now(1000.0 + seconds))
    later = decide(world(pods=(pod(0), early), memory=found.memory), now(1000.5 + seconds))
    assert any(isinstance(a, BeginRound) for a in later.actions) is begins
    if begins:
        new = begun(later).status
        assert new.condition(JobCondition.RESTARTING).reason == "PodSucceededEarly"
        assert new.members == (0, 4)


def test_the_absence_of_a_pod_is_confirmed_before_the_round_begins() -> None:
    assert begun(decide(world(pods=(pod(0),)), now())).confirm_gone == ("job-l2msg4-1-r0",)


GRACE_SECONDS = 100.0
STARTING = running_status(conditions=())


@pytest.mark.fault("A pod leaves while it saves, flushes, hangs or the operator restarts")
@pytest.mark.parametrize(
    ("waited", "changes", "restarts"),
    [
        pytest.param(0.0, {}, False, id="it may save first"),
        pytest.param(GRACE_SECONDS, {}, False, id="and flush until its grace period is over"),
        pytest.param(GRACE_SECONDS + KUBELET_SECONDS, {}, True, id="not for ever"),
        pytest.param(0.0, {"coordinator": state(finished=True)}, True, id="it has saved"),
        pytest.param(0.0, {"coordinator": state(dead=DEAD)}, True, id="it is broken already"),
        pytest.param(0.0, {"coordinator": None, "status": STARTING}, True, id="no gang trains"),
        pytest.param(0.0, {"coordinator": None}, False, id="the operator has just started"),
        pytest.param(
            COORDINATOR_ANSWER_SECONDS, {"coordinator": None}, True, id="no coordinator answers"
        ),
    ],
)
@pytest.mark.parametrize("leaves", ["terminating", "disrupted"])
def test_a_pod_that_leaves(
    leaves: str, waited: float, changes: dict[str, Any], restarts: bool
) -> None:
    pods = (pod(0), pod(1, grace_seconds=GRACE_SECONDS, **{leaves: True}))
    first = decide(world(pods=pods, **changes), now())
    second = decide(world(pods=pods, memory=first.memory, **changes), now(1000.0 + waited))
    assert any(isinstance(a, BeginRound) for a in second.actions) is restarts


def saved(copied: int) -> CoordinatorState:
    """Return the state of a gang that stopped after step 42, whose newest copied step is `copied`."""
    newest, replicated = (RestorePoint(Step(s), RestartRound(3)) for s in (42, copied))
    return state(last_local=newest, last_replicated=replicated)


@pytest.mark.fault("The trainer of a leaving pod has ended before its copies are durable")
@pytest.mark.parametrize(
    ("copied", "spec", "others", "restarts"),
    [
        pytest.param(42, {}, {}, True, id="another pod has its shards"),
        pytest.param(40, {}, {}, False, id="its shards are being copied"),
        pytest.param(42, {"peer_copies": 0}, {}, False, id="no step has copies"),
        pytest.param(42, {}, {"terminating": True}, False, id="the pod with the copies leaves too"),
        pytest.param(42, {}, None, False, id="the pod with the copies is gone"),
    ],
)
def test_the_round_begins_when_the_last_step_does_not_need_the_pod_that_stopped(
    copied: int, spec: dict[str, Any], others: dict[str, Any] | None, restarts: bool
) -> None:
    leaving = pod(1, terminating=True, trainer_exit_code=143)
    pods = (leaving,) if others is None else (pod(0, **others), leaving)
    observed = world(pods=pods, coordinator=saved(copied), spec=spec)
    first = decide(observed, now())
    second = decide(replace(observed, memory=first.memory), now(1001.0))
    assert any(isinstance(a, BeginRound) for a in second.actions) is restarts


@pytest.mark.fault("A pod has left while another one still flushes")
@pytest.mark.parametrize(
    ("dead", "restarts"),
    [
        pytest.param((), False, id="the gang has stopped"),
        pytest.param(DEAD, True, id="the gang is broken"),
    ],
)
def test_a_pod_that_has_left_waits_for_another_one_that_still_flushes(
    dead: tuple[DeadRank, ...], restarts: bool
) -> None:
    observed = world(pods=(pod(0, terminating=True),), coordinator=state(dead=dead))
    first = decide(observed, now())
    second = decide(replace(observed, memory=first.memory), now(1001.0))
    assert any(isinstance(a, BeginRound) for a in second.actions) is restarts


def test_a_leaving_pod_keeps_its_address_for_the_others() -> None:
    """Its sidecar sends the shards of the last step, and may be the coordinator that commits it."""
    calm, leaves = world(), world(pods=(pod(0, terminating=True), pod(1)))
    assert round_message(world_of(leaves)) == round_message(world_of(calm))


@pytest.mark.fault("A sidecar names the worker of a dead rank, and no such worker exists")
@pytest.mark.parametrize("worker", [-1, 2, 10**30])
def test_a_dead_rank_of_a_worker_that_does_not_exist_begins_a_round(worker: int) -> None:
    dead = (DeadRank(Rank(1), Worker(1), 1, "boom"), DeadRank(Rank(9), Worker(worker), 1, "boom"))
    record = begun(decide(world(coordinator=state(dead=dead)), now())).status.last_recovery
    assert record.workers == (1,)


def restarted(seconds: float, count: int) -> tuple[RestartRecord, ...]:
    at = START + timedelta(seconds=seconds)
    return (RestartRecord(round=RestartRound(1), at=at),) * count


@pytest.mark.parametrize(
    ("recent", "committed", "ends"),
    [
        pytest.param(restarted(990, 2), 9, True, id="budget spent"),
        pytest.param(restarted(990, 1), 9, False, id="one left"),
        pytest.param(restarted(900, 2), 9, False, id="outside the window"),
        pytest.param(restarted(900, 2), None, True, id="outside the window, and no step"),
        pytest.param(restarted(900, 1), None, False, id="no step, and one left"),
    ],
)
def test_restart_budget(
    recent: tuple[RestartRecord, ...], committed: int | None, ends: bool
) -> None:
    spec = {"max_restarts": 2, "window": "60s"}
    decision = decide(
        world(
            coordinator=state(dead=DEAD),
            status=running_status(recent_restarts=recent, last_committed_step=committed),
            spec=spec,
        ),
        now(),
    )
    first = decision.actions[0]
    if ends:
        assert isinstance(first, WriteStatus)
        assert first.status.condition(JobCondition.FAILED).reason == Reason.BACKOFF_LIMIT_EXCEEDED
    else:
        begun(decision)


@pytest.mark.fault("A job has more than 128 restarts within `maxRestarts`")
def test_a_budget_above_128_is_spent_as_well() -> None:
    """Each restart of a long budget is remembered until the limit is reached."""
    spec = {"max_restarts": 1000, "window": "24h"}
    many = running_status(recent_restarts=restarted(990, 999))
    seen = JobMemory(round=RestartRound(3), round_seen_at=900.0, failure_seen_at=1000.0)
    dead = state(dead=DEAD)
    last = begun(decide(world(coordinator=dead, status=many, spec=spec, memory=seen), now(2000.0)))
    assert counting(last.status) == 1000
    assert len(last.status.recent_restarts) == 1000
    spent = running_status(recent_restarts=last.status.recent_restarts)
    decision = decide(world(coordinator=dead, status=spent, spec=spec, memory=seen), now(2000.0))
    assert isinstance(decision.actions[0], WriteStatus)
    assert decision.actions[0].status.is_true(JobCondition.FAILED)


def test_a_budget_that_is_spent_does_not_stop_disruptions() -> None:
    spec = {"max_restarts": 0}
    begun(decide(world(pods=(pod(0),), spec=spec), now()))


def starting(pods: tuple[PodView, ...], **changes: Any) -> Observed:
    """Return a world in round 3 before its restore point is chosen."""
    base = status(3, (0, 3), conditions=())
    return world(status=base, pods=pods, coordinator=None, **changes)


def test_a_pod_that_was_not_created_yet_is_not_lost() -> None:
    decision = decide(starting((pod(0),)), now())
    assert not any(isinstance(a, BeginRound) for a in decision.actions)


def test_a_survivor_that_is_lost_before_the_restore_point_is_chosen_joins_the_round() -> None:
    taken_in = begun(decide(starting((pod(1, 3),)), now())).status
    assert (taken_in.restart_round, taken_in.members) == (3, (3, 3))


def test_a_member_that_ended_before_the_round_ran_is_replaced() -> None:
    ended = starting((pod(0, phase=PodPhase.SUCCEEDED), pod(1, 3)))
    assert begun(decide(ended, now())).status.members == (4, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param(
            {"memory_limit": "4Gi"},
            "pod job-l2msg4-1-r0 failed: its container ran out of memory at its limit of 4Gi",
            id="the container's limit",
        ),
        pytest.param({}, "It has no limit, so the node ran out of memory", id="no limit"),
    ],
)
def test_a_container_that_ran_out_of_memory_is_reported_with_its_limit(
    changes: dict[str, Any], text: str
) -> None:
    failed = pod(1, phase=PodPhase.FAILED, reason="OOMKilled", trainer_exit_code=137, **changes)
    restarting = begun(decide(world(pods=(pod(0), failed)), now())).status.condition("Restarting")
    assert restarting.reason == Reason.OOM_KILLED
    assert text in restarting.message
