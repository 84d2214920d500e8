"""Which spares are ready, which of them becomes which worker, and what is created and deleted (ADR 0015)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import UID, job, metadata, now, pod, sidecar, status, world_of
from tests.support.operator.decisions import begun, created_pods, of_kind

from holdfast_core.api import (
    JobCondition,
    NodeFailure,
    PromotedSpare,
    RestorePointStatus,
    SparesStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.api.failure_policy import AvoidNodesSpec
from holdfast_core.ids import FIRST_SPARE, MAX_SPARES, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState
from holdfast_core.names import certificates_secret_name, pod_name
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.nodes import ready_spares
from holdfast_operator.decide.gang import SPARES_EVERY_SECONDS
from holdfast_operator.model.actions import BeginRound, Delete, EmitEvent, WriteStatus
from holdfast_operator.model.job import (
    JobMemory,
    NodeView,
    Observed,
    PodPhase,
    PodView,
    Reachable,
    SidecarView,
    Taint,
)
from holdfast_operator.model.labels import QUEUE_NAME
from holdfast_operator.model.ownership import OwnPods
from holdfast_operator.model.reasons import Reason

WORKERS = 3
SPARE = pod(FIRST_SPARE)
SECOND = pod(FIRST_SPARE + 1)
SPOT = Taint("example.com/spot", "NoSchedule")


def spare_sidecar(of: PodView, **changes: Any) -> SidecarView:
    """Return the sidecar of a spare that is ready."""
    view = sidecar(of, 0)
    assert view.inventory is not None
    return replace(
        view, inventory=replace(view.inventory, worker=of.worker, launcher=True), **changes
    )


def training(
    *pods: PodView,
    spares: int = 1,
    sidecars: tuple[SidecarView, ...] | None = None,
    nodes: dict[str, NodeView] | None = None,
    labels: dict[str, str] | None = None,
    **changes: Any,
) -> Observed:
    """Return a gang of three that trains in round 0, with these pods and ready spares.

    Args:
        labels: Topology domain of each node.
    """
    begun = status(
        0,
        (0,) * WORKERS,
        restore_point=RestorePointStatus(),
        coordinator=Worker(0),
        spares=SparesStatus(ready=spares, births=(RestartRound(0),) * spares) if spares else None,
    )
    begun = changed(begun, **changes)
    found = {
        p.node: NodeView(p.node, labels={"zone": (labels or {}).get(p.node, p.node)})
        for p in pods
        if p.node is not None
    }
    views = [
        spare_sidecar(p) if p.worker >= FIRST_SPARE else sidecar(p, 0, version=1) for p in pods
    ]
    known = JobMemory(round=RestartRound(0), round_seen_at=900.0, failure_seen_at=990.0)
    return Observed(
        job=job(WORKERS, begun, spares=spares, topology_key="zone"),
        pods=pods,
        sidecars=tuple(views) if sidecars is None else sidecars,
        nodes={**found, **(nodes or {})},
        coordinator=CoordinatorState(5, RestartRound(0), running=True),
        memory=known,
    )


def promoted(of: TrainingJobStatus) -> dict[int, str]:
    return {r.worker: r.pod for r in of.spares.promoted}


def test_the_round_takes_a_ready_spare_and_wants_a_new_one() -> None:
    decision = decide(training(pod(0), pod(2), SPARE), now(1000.0))
    [write] = [a for a in decision.actions if isinstance(a, BeginRound)]
    assert write.status.members == (0, 1, 0)
    assert write.status.spares == SparesStatus(
        ready=0,
        births=(RestartRound(1),),
        promoted=(PromotedSpare(worker=Worker(1), pod=SPARE.name),),
    )
    events = [a for a in decision.actions if isinstance(a, EmitEvent)]
    assert [e.reason for e in events if e.reason == Reason.SPARE_PROMOTED] == ["SparePromoted"]


def test_the_promoted_spare_is_sealed_and_then_gets_its_round() -> None:
    after = begun(decide(training(pod(0), pod(2), SPARE), now())).status
    chosen = changed(after, restore_point=RestorePointStatus(), coordinator=Worker(0))
    source = OwnPods(job(WORKERS, chosen, spares=1))
    pods = source.members((pod(0), pod(2), SPARE), frozenset())
    assert [(p.worker, p.birth_round) for p in pods] == [(0, 0), (2, 0), (1, 1)]
    observed = replace(training(), job=source.job, pods=pods, coordinator=None)
    unsealed = replace(observed, sidecars=tuple(sidecar(p, 0) for p in pods))
    actions = decide(unsealed, now(1001.0)).actions
    assert {a.pod for a in of_kind(actions, "call /v1/seal")} == {p.name for p in pods}
    assert not of_kind(actions, "create Pod", "delete Pod", "create Secret")
    sealed = replace(observed, sidecars=tuple(sidecar(p, 1) for p in pods))
    sent = of_kind(decide(sealed, now(1002.0)).actions, "call /v1/round")
    assert {a.worker for a in sent} == {0, 1, 2}
    assert [(m.worker, m.pod) for m in sent[0].message.message.members][1] == (1, SPARE.name)


def test_a_promoted_spare_that_is_lost_is_a_failure_before_the_restore_point_is_chosen() -> None:
    """Another pod of its name would be sealed for an older round, and could be an empty one."""
    after = begun(decide(training(pod(0), pod(2), SPARE), now())).status
    observed = replace(
        training(),
        job=job(WORKERS, after, spares=1),
        pods=(pod(0), pod(2)),
        sidecars=(sidecar(pod(0), 1), sidecar(pod(2), 1)),
        coordinator=None,
        memory=JobMemory(round=RestartRound(1), round_seen_at=900.0, failure_seen_at=900.0),
    )
    new = begun(decide(observed, now(1001.0)))
    assert (new.status.restart_round, new.status.members) == (2, (0, 2, 0))
    assert new.confirm_gone == (SPARE.name,)


SILENT = SidecarView(SPARE.worker, SPARE.uid, Reachable.NO, unreachable_since=1.0)


@pytest.mark.parametrize(
    ("spare", "view"),
    [
        pytest.param(replace(SPARE, terminating=True), None, id="it is being deleted"),
        pytest.param(replace(SPARE, disrupted=True), None, id="it is being evicted"),
        pytest.param(replace(SPARE, phase=PodPhase.FAILED), None, id="it has failed"),
        pytest.param(replace(SPARE, trainer_exit_code=1), None, id="its launcher has ended"),
        pytest.param(replace(SPARE, ip=None), None, id="it has no address"),
        pytest.param(SPARE, SILENT, id="its sidecar does not answer"),
        pytest.param(SPARE, sidecar(SPARE, 0), id="its launcher is not connected"),
    ],
)
def test_a_spare_is_not_taken_because(spare: PodView, view: SidecarView | None) -> None:
    views = (sidecar(pod(0), 0), sidecar(pod(2), 0), view or spare_sidecar(spare))
    observed = training(pod(0), pod(2), spare, sidecars=views)
    assert promoted(begun(decide(observed, now())).status) == {}


@pytest.mark.fault("A spare is on the node that is lost with a worker")
@pytest.mark.parametrize(
    "node",
    [
        NodeView(f"node-{FIRST_SPARE}", lost_because="does not renew its lease"),
        NodeView(f"node-{FIRST_SPARE}", leaving_taints=frozenset({SPOT})),
    ],
    ids=["is lost", "will be taken away"],
)
def test_a_spare_is_not_taken_if_its_node(node: NodeView) -> None:
    observed = training(pod(0), pod(2), SPARE, nodes={node.name: node})
    assert promoted(begun(decide(observed, now())).status) == {}


def test_a_spare_on_a_node_on_which_workers_failed_is_not_ready() -> None:
    node = SPARE.node or ""
    failure = NodeFailure(node=node, at=now(900.0).utc)
    observed = training(pod(0), pod(1), pod(2), SPARE, node_failures=(failure,))
    policy = changed(observed.job.spec.failure_policy, avoid_nodes=AvoidNodesSpec(failures=1))
    spec = changed(observed.job.spec, failure_policy=policy)
    assert len(ready_spares(world_of(observed), observed.job.status)) == 1
    avoiding = world_of(replace(observed, job=changed(observed.job, spec=spec)))
    assert ready_spares(avoiding, observed.job.status) == ()


@pytest.mark.parametrize(
    ("zones", "taken"),
    [
        ({"node-0": "a", f"node-{FIRST_SPARE}": "a", f"node-{FIRST_SPARE + 1}": "b"}, SECOND),
        ({"node-0": "b", f"node-{FIRST_SPARE}": "a", f"node-{FIRST_SPARE + 1}": "b"}, SPARE),
        ({}, SPARE),
    ],
    ids=["a worker is in the zone of the first", "of the second", "all zones are equal"],
)
def test_the_spare_in_the_zone_with_the_fewest_workers_is_taken(
    zones: dict[str, str], taken: PodView
) -> None:
    observed = training(pod(0), pod(2), SPARE, SECOND, spares=2, labels=zones)
    after = begun(decide(observed, now())).status
    assert promoted(after) == {1: taken.name}
    number = taken.worker - FIRST_SPARE
    assert after.spares.births == tuple(RestartRound(int(n == number)) for n in range(2))


def test_two_lost_workers_take_two_spares_in_two_zones() -> None:
    third = pod(FIRST_SPARE + 2)
    zones = {SPARE.node or "": "a", SECOND.node or "": "a", third.node or "": "b", "node-0": "c"}
    observed = training(pod(0), SPARE, SECOND, third, spares=3, labels=zones)
    assert promoted(begun(decide(observed, now())).status) == {1: SPARE.name, 2: third.name}


def test_two_lost_workers_take_the_spare_and_a_new_pod() -> None:
    after = begun(decide(training(pod(0), SPARE), now())).status
    assert promoted(after) == {1: SPARE.name}
    assert after.members == (0, 1, 1)


def test_a_spare_of_the_present_round_is_not_taken() -> None:
    """A round that takes in a further loss could not give the next spare another name (ADR 0008)."""
    young = pod(FIRST_SPARE, 1)
    members = (RestartRound(0), RestartRound(0), RestartRound(1))
    observed = training(pod(0), pod(2, 1), young)
    restarted = changed(
        observed.job.status,
        restart_round=RestartRound(1),
        members=members,
        restore_point=None,
        spares=SparesStatus(births=(RestartRound(1),)),
    )
    observed = replace(
        observed,
        job=changed(observed.job, status=restarted),
        coordinator=None,
        memory=replace(observed.memory, round=RestartRound(1)),
    )
    after = begun(decide(observed, now())).status
    assert (after.restart_round, after.members) == (1, (0, 1, 1))
    assert promoted(after) == {}


def test_spares_are_created_with_the_certificates_of_all_later_ones() -> None:
    actions = decide(training(pod(0), pod(1), pod(2)), now(1000.0)).actions
    [create] = created_pods(actions)
    assert (create.name, create.worker, create.birth_round) == (SPARE.name, FIRST_SPARE, 0)
    [secret] = of_kind(actions, "create Secret")
    assert secret.name == certificates_secret_name("job", UID, FIRST_SPARE, 0)
    names = [pod_name("job", UID, FIRST_SPARE + n, 0) for n in range(MAX_SPARES)]
    assert list(secret.leaves) == names


def test_a_refused_spare_is_not_created_in_each_pass() -> None:
    """A pass with a refused create is incomplete: the coordinator does not learn what the operator wrote."""
    observed = training(pod(0), pod(1), pod(2))
    first = decide(observed, now(1000.0))
    later = replace(observed, memory=first.memory)
    for at, creates in ((1005.0, False), (1000.0 + SPARES_EVERY_SECONDS, True)):
        actions = decide(later, now(at)).actions
        assert bool(of_kind(actions, "create Pod")) == creates


@pytest.mark.parametrize("running", [True, False])
def test_spares_are_created_while_the_gang_trains_only(running: bool) -> None:
    observed = training(pod(0), pod(1), pod(2))
    state = CoordinatorState(5, RestartRound(0), running=running)
    actions = decide(replace(observed, coordinator=state), now(1000.0)).actions
    assert bool(of_kind(actions, "create Pod")) == running


@pytest.mark.parametrize(
    ("spare", "node", "force"),
    [
        (replace(SPARE, phase=PodPhase.FAILED), None, False),
        (SPARE, NodeView(SPARE.node or "", lost_because="no lease", is_silent=True), True),
    ],
    ids=["failed", "on a lost node"],
)
def test_a_lost_spare_is_deleted(spare: PodView, node: NodeView | None, force: bool) -> None:
    pods = (pod(0), pod(1), pod(2))
    views = (*(sidecar(p, 0) for p in pods), SILENT)
    nodes = {} if node is None else {node.name: node}
    observed = training(*pods, spare, sidecars=views, nodes=nodes)
    decision = decide(observed, now(1000.0))
    assert [a for a in decision.actions if isinstance(a, BeginRound)] == []
    assert of_kind(decision.actions, "delete Pod") == [
        Delete("Pod", spare.name, spare.uid, "", force=force)
    ]


def test_the_condition_says_what_a_spare_waits_for() -> None:
    waiting = replace(
        SPARE,
        phase=PodPhase.PENDING,
        node=None,
        ip=None,
        sidecar_started=False,
        reason="Unschedulable",
        message="0/3 nodes are available",
    )
    actions = decide(training(pod(0), pod(1), pod(2), waiting), now(1000.0)).actions
    [write] = [a for a in actions if isinstance(a, WriteStatus)]
    found = write.status.condition(JobCondition.SPARES_READY)
    assert (found.status, found.reason) == ("False", Reason.SPARES_WAIT)
    assert found.message == (
        f"0 of 1 spare pods are ready: pod {waiting.name} is not scheduled: 0/3 nodes are available"
    )
    assert of_kind(actions, "delete Pod") == []


def test_a_job_without_spares_gets_neither_status_nor_condition() -> None:
    actions = decide(training(pod(0), pod(1), pod(2), spares=0), now(1000.0)).actions
    [write] = [a for a in actions if isinstance(a, WriteStatus)]
    assert write.status.spares is None
    assert write.status.condition(JobCondition.SPARES_READY) is None


def test_a_job_in_a_queue_has_no_spares_and_its_condition_says_why() -> None:
    observed = training(pod(0), pod(1), pod(2), SPARE)
    queued = metadata(observed.job, labels={QUEUE_NAME: "team-a"})
    actions = decide(replace(observed, job=queued), now(1000.0)).actions
    [write] = [a for a in actions if isinstance(a, WriteStatus)]
    assert write.status.spares is None
    found = write.status.condition(JobCondition.SPARES_READY)
    assert (found.status, found.reason) == ("False", Reason.SPARES_WAIT)
    assert "a job in a queue of Kueue has none" in found.message


def test_an_empty_label_of_a_queue_names_none_and_the_job_has_its_spares() -> None:
    observed = training(pod(0), pod(1), pod(2), SPARE)
    unqueued = metadata(observed.job, labels={QUEUE_NAME: ""})
    world = world_of(replace(observed, job=unqueued))
    assert world.wanted_spares == 1
    assert [s.worker for s in ready_spares(world, world.status)] == [FIRST_SPARE]
