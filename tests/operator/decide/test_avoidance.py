"""Pods that have not started avoid lost nodes, and are created again where that helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import job, now, pod, sidecar, status, world_of
from tests.support.operator.decisions import created_pods, of_kind

from holdfast_core.api import RestorePointStatus, changed
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.nodes import MAX_AVOIDED
from holdfast_operator.model.actions import Delete, WriteStatus
from holdfast_operator.model.job import (
    JobMemory,
    NodeView,
    Observed,
    PodPhase,
    PodView,
    Taint,
    tolerated_taints,
)

GONE = "job-l2msg4-1-r1"
NEVER_STARTED = JobMemory(round=RestartRound(1), round_seen_at=1.0, unstarted=frozenset({GONE}))


def waiting(node: str | None, *avoided: str, **changes: Any) -> PodView:
    """Return the replacement of worker 1, which has not started."""
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


UNREACHABLE = Taint("node.kubernetes.io/unreachable", "NoSchedule")


def lost_node(name: str, *taints: Taint) -> NodeView:
    return NodeView(name, taints=frozenset(taints), lost_because="is gone")


def observe(
    replacement: PodView | None, lost: Sequence[str], *tainted: str, **changes: Any
) -> Observed:
    """Return a world in which the nodes `lost` and `tainted` are lost, the newest loss first.

    Kubernetes has tainted the nodes in `tainted`.
    """
    survivor = pod(0)
    chosen = RestorePointStatus()
    pods = (survivor,) if replacement is None else (survivor, replacement)
    bound = {p.node for p in pods if p.node is not None}
    base = {
        "job": job(2, status(1, (0, 1), restore_point=chosen, coordinator=Worker(0))),
        "pods": pods,
        "sidecars": (sidecar(survivor, 1),),
        "nodes": {
            n: NodeView(n, lost_because="is gone", is_silent=True)
            if n in (*lost, *tainted, "deleted")
            else NodeView(n)
            for n in bound
        },
        "lost_nodes": (
            *(lost_node(n) for n in lost),
            *(lost_node(n, UNREACHABLE) for n in tainted),
        ),
    }
    return Observed(**{**base, **changes})


def deletes(observed: Observed) -> list[Delete]:
    return of_kind(decide(observed, now()).actions, "delete Pod")


def creates(observed: Observed) -> list[PodView]:
    return created_pods(decide(observed, now()).actions)


@pytest.mark.parametrize(
    ("name", "replacement", "lost", "tainted", "force"),
    [
        ("bound to a lost node", waiting("a"), ["a"], [], True),
        ("bound to a lost node that has its taint now", waiting("a"), [], ["a"], True),
        ("bound to a node whose object is gone", waiting("deleted"), [], [], True),
        ("bound to a second lost node", waiting("b", "a"), ["a", "b"], [], True),
        ("deleted on a lost node", waiting("a", "a", terminating=True), ["a"], [], True),
        ("a node that it avoids is back", waiting(None, "a", "b"), ["b"], [], False),
        ("a node that it avoids is tainted", waiting(None, "a", "b"), ["b"], ["a"], False),
    ],
)
def test_created_again(
    name: str, replacement: PodView, lost: list[str], tainted: list[str], force: bool
) -> None:
    observed = observe(replacement, lost, *tainted)
    assert deletes(observed) == [Delete("Pod", replacement.name, replacement.uid, "", force)], name
    assert decide(observed, now()).memory.unstarted == {replacement.name}


@pytest.mark.fault("The template names the lost node, or the scheduler ignores affinities")
@pytest.mark.parametrize(
    ("name", "replacement", "lost", "tainted"),
    [
        ("the nodes that it avoids are still lost", waiting(None, "a"), ["a"], []),
        ("avoids nothing and waits for capacity", waiting(None), ["a"], []),
        ("avoids nothing while a tainted node is lost", waiting(None), [], ["a"]),
        ("bound to a good node, another is back", waiting("c", "a"), [], []),
        ("a scheduler that ignores affinities", waiting("a", "a"), ["a"], []),
        ("on its way out already", waiting(None, "a", terminating=True), [], []),
        ("on its way out, on a good node", waiting("c", terminating=True), ["a"], []),
    ],
)
def test_left_alone(name: str, replacement: PodView, lost: list[str], tainted: list[str]) -> None:
    observed = observe(replacement, lost, *tainted)
    assert deletes(observed) == [], name
    assert decide(observed, now()).memory.round == 1


def test_under_suspend_no_pod_is_deleted_that_would_not_come_back() -> None:
    base = observe(waiting("a"), ["a"])
    suspended = job(2, base.job.status, suspend=True)
    assert deletes(observe(waiting("a"), ["a"], job=suspended)) == []


def test_a_deleted_pod_that_never_started_is_created_in_its_round_without_the_lost_nodes() -> None:
    observed = observe(None, ["b", "a"], memory=NEVER_STARTED)
    [create] = creates(observed)
    assert (create.name, create.worker, create.birth_round) == (GONE, 1, 1)
    assert (create.avoided_nodes, create.failed_nodes) == ({"a", "b"}, set())
    assert decide(observed, now()).memory.unstarted == {GONE}


def test_a_node_that_kubernetes_has_tainted_is_not_excluded() -> None:
    """Karpenter adds no node for a pod that excludes nodes by name."""
    (create,) = creates(observe(None, ["a"], "b", memory=NEVER_STARTED))
    assert create.avoided_nodes == {"a"}


@pytest.mark.fault("A template tolerates the taint of lost nodes")
@pytest.mark.parametrize(
    ("name", "toleration", "excluded"),
    [
        ("everything", {"operator": "Exists"}, ("a",)),
        ("the key", {"key": UNREACHABLE.key, "operator": "Exists"}, ("a",)),
        ("the key without a value", {"key": UNREACHABLE.key, "effect": "NoSchedule"}, ("a",)),
        ("the key with a value", {"key": UNREACHABLE.key, "value": "x"}, ()),
        ("the effect NoExecute", {"operator": "Exists", "effect": "NoExecute"}, ()),
        ("another key", {"key": "gpu", "operator": "Exists"}, ()),
    ],
)
def test_a_template_that_tolerates_the_taint_excludes_the_node_while_it_is_lost(
    name: str, toleration: dict[str, str], excluded: tuple[str, ...]
) -> None:
    observed = observe(None, [], "a", memory=NEVER_STARTED)
    spec = observed.job.spec
    pod_spec = {**spec.template["spec"], "tolerations": [toleration]}
    of = changed(observed.job, spec=changed(spec, template={**spec.template, "spec": pod_spec}))
    (create,) = creates(replace(observed, job=of))
    assert create.avoided_nodes == set(excluded), name
    again = replace(observed, job=of, pods=(observed.pods[0], waiting(None, *excluded)))
    assert deletes(again) == [], "it is not created again and again"


@pytest.mark.fault("A taint of a lost node is tolerated by its value")
def test_a_taint_with_a_value_may_be_tolerated_by_its_value() -> None:
    spec = {"tolerations": [{"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown"}]}
    assert {taint.effect for taint in tolerated_taints(spec)} == {"NoSchedule", "NoExecute"}


def test_a_pod_that_had_started_is_lost_and_needs_a_round() -> None:
    observed = observe(None, ["a"], memory=JobMemory(round=RestartRound(1), round_seen_at=1.0))
    assert creates(observed) == []
    assert not world_of(observed).awaits_start(world_of(observed).members[1])


@pytest.mark.fault("More nodes are lost than an affinity should name")
def test_the_list_of_avoided_nodes_is_bounded_and_holds_the_newest_losses() -> None:
    nodes = [f"node-{i:03}" for i in reversed(range(MAX_AVOIDED + 1))]
    newest, oldest = nodes[0], nodes[-1]
    (create,) = creates(observe(None, nodes, memory=NEVER_STARTED))
    assert len(create.avoided_nodes) == MAX_AVOIDED
    assert newest in create.avoided_nodes
    assert deletes(observe(waiting(newest), nodes)) != []
    assert deletes(observe(waiting(oldest), nodes)) == [], "a new pod could be bound there again"


def test_the_message_of_a_waiting_pod_names_the_lost_nodes() -> None:
    message = "0/5 nodes are available"
    observed = observe(waiting(None, "a", message=message), ["a"])
    reason = decide(observed, now()).reason
    assert message in reason and "conditions end: a" in reason
    assert "node a, which is lost" in decide(observe(waiting("a"), ["a"]), now()).reason


OLDEST = [f"node-{i:03}" for i in reversed(range(MAX_AVOIDED + 1))]


def with_spec(observed: Observed, **spec: Any) -> Observed:
    return replace(observed, job=changed(observed.job, spec=changed(observed.job.spec, **spec)))


@pytest.mark.fault("A pod waits on a lost node while its template is refused")
@pytest.mark.parametrize(
    ("observed", "part"),
    [
        pytest.param(
            observe(waiting("a"), ["a"]), "created again, so that", id="another node fits"
        ),
        pytest.param(
            observe(waiting("a"), ["a"], template_refusal='unknown field "tolerationz"'),
            'unknown field "tolerationz"',
            id="the server refuses the template",
        ),
        pytest.param(
            with_spec(observe(waiting("a"), ["a"]), template={"spec": {"containers": []}}),
            "trainer",
            id="the template is invalid",
        ),
        pytest.param(
            observe(waiting(OLDEST[-1]), OLDEST),
            "a new pod might be bound to it again",
            id="more lost nodes than a pod avoids",
        ),
        pytest.param(
            observe(waiting(None, "a", "b"), ["b"], template_refusal='unknown field "tolerationz"'),
            'unknown field "tolerationz"',
            id="it avoids a node that is back, and the template is refused",
        ),
    ],
)
def test_the_status_says_that_a_pod_is_created_again_exactly_if_it_is(
    observed: Observed, part: str
) -> None:
    decision = decide(observed, now())
    written = [a for a in decision.actions if isinstance(a, WriteStatus)]
    running = written[0].status.condition("Running")
    assert part in running.message
    assert ("is created again, so that" in running.message) == (deletes(observed) != [])
