"""Nodes on which pods have not started in time are avoided, as far as this can help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.operator.builders import job, now, pod, status
from tests.support.operator.decisions import of_kind

from holdfast_core.api import NodeFailure, RestorePointStatus, changed
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import WriteStatus
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodPhase, Seen

LIMIT = 1800
AVOIDED = 32
BOUND_AT = 0.0
LATE_AT = 1900.0


def gang(workers: int, late: int, *, bound_at: float = BOUND_AT) -> Observed:
    """Return a gang in its first round, each pod on a node of its own. The first `late` have not started."""
    pods = tuple(
        pod(w, phase=PodPhase.PENDING, ip=None, ready=False, sidecar_started=False)
        if w < late
        else pod(w)
        for w in range(workers)
    )
    begun = status(
        0, (0,) * workers, restore_point=RestorePointStatus(), coordinator=Worker(workers - 1)
    )
    return Observed(
        job=job(workers, begun, start_timeout_seconds=LIMIT),
        pods=pods,
        nodes={f"node-{w}": NodeView(f"node-{w}") for w in range(workers)},
        memory=JobMemory(
            round=RestartRound(0),
            round_seen_at=0.0,
            seen={(Seen.BOUND, p.uid): bound_at for p in pods[:late]},
        ),
    )


def recorded(observed: Observed) -> tuple[NodeFailure, ...]:
    """Return the failures of nodes that a pass writes, or those that are known if it writes none."""
    writes = [a for a in decide(observed, now(LATE_AT)).actions if isinstance(a, WriteStatus)]
    found = writes[0].status if writes else observed.job.status
    return found.node_failures


def after_record(observed: Observed) -> Observed:
    known = changed(observed.job.status, node_failures=recorded(observed))
    return replace(observed, job=changed(observed.job, status=known))


def says(observed: Observed) -> str:
    [write] = (a for a in decide(observed, now(LATE_AT)).actions if isinstance(a, WriteStatus))
    return write.status.condition("Running").message


@pytest.mark.parametrize(
    ("workers", "late", "avoided"),
    [
        pytest.param(1, 1, 1, id="the only node"),
        pytest.param(2, 1, 1, id="one of two"),
        pytest.param(2, 2, 1, id="both of two"),
        pytest.param(8, 4, 4, id="half of them"),
        pytest.param(8, 5, 1, id="more than half of them"),
        pytest.param(80, 33, AVOIDED, id="more than a pod can avoid"),
        pytest.param(600, 257, AVOIDED, id="more than the status has room for"),
        pytest.param(600, 400, 1, id="more than half of many"),
    ],
)
def test_late_nodes_are_recorded_once_and_each_of_them_is_avoided(
    workers: int, late: int, avoided: int
) -> None:
    observed = gang(workers, late)
    first = recorded(observed)
    assert len(first) == avoided
    assert {f.late_in_round for f in first} <= {observed.job.status.restart_round}
    known = after_record(observed)
    decision = decide(known, now(LATE_AT))
    assert recorded(known) == first, "the status settles after one write"
    assert "new pods avoid" not in decision.reason.lower()
    gone = {a.name for a in of_kind(decision.actions, "delete Pod")}
    nodes = {f.node for f in first}
    assert gone == {p.name for p in observed.pods if p.node in nodes}, "and other rules are reached"


@pytest.mark.parametrize(("workers", "late"), [(2, 2), (3, 2), (5, 3), (7, 4), (8, 5)])
def test_the_other_pods_stay_while_the_new_one_has_no_node_yet(workers: int, late: int) -> None:
    known = after_record(gang(workers, late))
    moved = replace(known.pods[0], node=None, failed_nodes=frozenset({"node-0"}))
    known = replace(known, pods=(moved, *known.pods[1:]))
    assert len(recorded(known)) == 1
    assert "the cause is probably no node" not in says(known)


def test_the_status_says_that_pods_are_tried_on_other_nodes_first() -> None:
    assert "the pods of node-0 are tried on other nodes first" in says(after_record(gang(8, 5)))


def test_a_common_cause_is_named() -> None:
    """The pods of one node were tried on others, where they do not start either."""
    known = after_record(gang(8, 5))
    moved = replace(known.pods[0], node="node-9", failed_nodes=frozenset({"node-0"}))
    known = replace(
        known, pods=(moved, *known.pods[1:]), nodes={**known.nodes, "node-9": NodeView("node-9")}
    )
    assert len(recorded(known)) == 1
    message = says(known)
    assert "5 of the gang's 8 nodes" in message
    assert "the pods of node-0 have not started on other nodes either" in message
    assert "the cause is probably no node" in message


def test_all_late_nodes_are_avoided_once_a_pod_of_one_of_them_has_started_elsewhere() -> None:
    known = after_record(gang(8, 8))
    moved = pod(0, node="node-9", failed_nodes=frozenset({"node-0"}))
    nodes = {**known.nodes, "node-9": NodeView("node-9")}
    known = replace(known, pods=(moved, *known.pods[1:]), nodes=nodes)
    assert {f.node for f in recorded(known)} == {f"node-{n}" for n in range(8)}


def test_pods_of_a_common_cause_become_late_one_after_another() -> None:
    observed = gang(8, 5)
    times = {key: 30.0 * i for i, key in enumerate(observed.memory.seen)}
    staggered = replace(observed, memory=replace(observed.memory, seen=times))
    assert [f.node for f in recorded(staggered)] == ["node-0"]


def test_pods_on_further_nodes_stay_and_the_message_says_why() -> None:
    known = after_record(gang(80, 33))
    assert f"A pod avoids {AVOIDED} nodes at most" in says(known)


def test_no_node_is_recorded_while_the_template_is_refused() -> None:
    refused = replace(gang(8, 1), template_refusal='unknown field "spec.x"')
    assert recorded(refused) == ()
