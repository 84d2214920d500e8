"""Pods that have not started: kept away from lost nodes, and created again where that helps."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator.builders import job, now, pod, sidecar, status

from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.avoidance import MAX_AVOIDED
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.actions import CreatePod, DeletePod
from holdfast_operator.model.job import (
    JobMemory,
    NodeView,
    Observed,
    PodPhase,
    PodView,
    RestorePointView,
)

GONE = "job-l2msg4-1-r1"


def waiting(node: str | None, *avoided: str, **changes: Any) -> PodView:
    """The replacement of worker 1, which has not started."""
    return pod(
        1,
        1,
        phase=PodPhase.PENDING,
        ip=None,
        node=node,
        ready=False,
        sidecar_started=False,
        avoided_nodes=frozenset(avoided),
        **changes,
    )


def observe(replacement: PodView | None, lost: set[str], **changes: Any) -> Observed:
    survivor = pod(0)
    chosen = RestorePointView()
    pods = (survivor,) if replacement is None else (survivor, replacement)
    bound = {p.node for p in pods if p.node is not None}
    base = {
        "job": job(2, status(1, (0, 1), restore_point=chosen, coordinator=Worker(0))),
        "pods": pods,
        "sidecars": (sidecar(survivor, 1),),
        "nodes": {n: NodeView(n, lost=n in lost or n == "deleted") for n in bound},
        "lost_nodes": frozenset(lost),
    }
    return Observed(**{**base, **changes})


def deletes(observed: Observed) -> list[DeletePod]:
    return [a for a in decide(observed, now()).actions if isinstance(a, DeletePod)]


def creates(observed: Observed) -> list[CreatePod]:
    return [a for a in decide(observed, now()).actions if isinstance(a, CreatePod)]


@pytest.mark.parametrize(
    ("name", "replacement", "lost", "force"),
    [
        ("bound to a lost node", waiting("a"), {"a"}, True),
        ("bound to a node whose object is gone", waiting("deleted"), set(), True),
        ("bound to a second lost node", waiting("b", "a"), {"a", "b"}, True),
        ("deleted on a lost node", waiting("a", "a", terminating=True), {"a"}, True),
        ("a node that it avoids is back", waiting(None, "a", "b"), {"b"}, False),
    ],
)
def test_created_again(name: str, replacement: PodView, lost: set[str], force: bool) -> None:
    observed = observe(replacement, lost)
    assert deletes(observed) == [DeletePod(replacement.name, replacement.uid, force)], name
    assert decide(observed, now()).memory.unstarted == {replacement.name}


@pytest.mark.parametrize(
    ("name", "replacement", "lost"),
    [
        ("the nodes that it avoids are still lost", waiting(None, "a"), {"a"}),
        ("avoids nothing and waits for capacity", waiting(None), {"a"}),
        ("bound to a good node, another is back", waiting("c", "a"), set()),
        ("a scheduler that ignores affinities", waiting("a", "a"), {"a"}),
        ("on its way out already", waiting(None, "a", terminating=True), set()),
        ("on its way out, on a good node", waiting("c", terminating=True), {"a"}),
    ],
)
def test_left_alone(name: str, replacement: PodView, lost: set[str]) -> None:
    observed = observe(replacement, lost)
    assert deletes(observed) == [], name
    assert decide(observed, now()).memory.round == 1


def test_under_suspend_no_pod_is_deleted_that_would_not_come_back() -> None:
    base = observe(waiting("a"), {"a"})
    suspended = job(2, base.job.status, suspend=True)
    assert deletes(observe(waiting("a"), {"a"}, job=suspended)) == []


def test_a_deleted_pod_that_never_started_is_created_in_its_round_without_the_lost_nodes() -> None:
    known = JobMemory(round=RestartRound(1), round_seen_at=1.0, unstarted=frozenset({GONE}))
    observed = observe(None, {"b", "a"}, memory=known)
    assert creates(observed) == [CreatePod(GONE, Worker(1), RestartRound(1), ("a", "b"))]
    assert decide(observed, now()).memory.unstarted == {GONE}


def test_a_pod_that_had_started_is_lost_and_needs_a_round() -> None:
    observed = observe(None, {"a"}, memory=JobMemory(round=RestartRound(1), round_seen_at=1.0))
    assert creates(observed) == []
    assert not World(observed).awaits_start(World(observed).members[1])


def test_the_list_of_avoided_nodes_is_bounded() -> None:
    known = JobMemory(round=RestartRound(1), round_seen_at=1.0, unstarted=frozenset({GONE}))
    nodes = {f"node-{i:03}" for i in range(MAX_AVOIDED + 1)}
    (create,) = creates(observe(None, nodes, memory=known))
    assert len(create.avoided_nodes) == MAX_AVOIDED
    left_out = max(nodes)
    assert deletes(observe(waiting(left_out), nodes)) == [], "a new pod could be bound there again"


def test_the_wait_is_said() -> None:
    message = "0/5 nodes are available"
    observed = observe(waiting(None, "a", message=message), {"a"})
    reason = decide(observed, now()).reason
    assert message in reason and "renews its lease: a" in reason
    assert "node a, whose lease has stopped" in decide(observe(waiting("a"), {"a"}), now()).reason
