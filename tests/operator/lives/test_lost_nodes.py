"""A node that dies or is cut off costs one round, whatever the scheduler does before Kubernetes taints the
node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.operator.builders import NAMESPACE
from tests.support.operator.decisions import counting
from tests.support.operator.fake_cluster import LEASE_SECONDS, TAINT_SECONDS, FakeNode
from tests.support.operator.life import Life, begun, chosen
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_operator.model.job import PodView
from holdfast_operator.model.ownership import worker_identity
from holdfast_operator.watch.records import pod_view

LONG = 3 * TAINT_SECONDS
AT_ONCE = 3
"""Seconds in which a replacement is created and bound."""


def training(**options: Any) -> Life:
    life = Life(**options)
    life.cluster.gang.peers_hang = True
    life.run(40)
    assert life.status.is_true("Running")
    return life


def training_on_many_nodes() -> tuple[Life, list[FakeNode]]:
    """Return a gang that trains in a cluster with 12 further nodes, and these with the node of worker 2."""
    life = training()
    others = {f"other-{n}": FakeNode(f"other-{n}") for n in range(12)}
    life.cluster.nodes |= others
    life.run(10)
    return life, [*others.values(), life.node_of(2)]


def only_node_that_fits(life: Life, worker: int) -> FakeNode:
    """Return the worker's node, after filling all other nodes."""
    node = life.node_of(worker)
    life.cluster.full_nodes = set(life.cluster.nodes) - {node.name}
    return node


def waiting_pod(life: Life, worker: int) -> PodView:
    """Return the worker's pod, as the operator parses it, and assert that it has no node."""
    raw = life.cluster.api.objects["pods", NAMESPACE, life.pod(worker)]
    identity = worker_identity(raw)
    assert identity is not None
    pod = pod_view(raw, identity)
    assert pod.node is None
    return pod


def bound_nodes(life: Life) -> set[str | None]:
    return {p.view.node for p in life.cluster.pods.values()}


def writes_of_pods(life: Life) -> int:
    return sum("/pods" in path for _, path in life.cluster.api.requests)


@pytest.mark.fault("Ranks fail before the lost node's lease has stopped")
def test_ranks_that_fail_before_the_lease_has_stopped_begin_no_round_of_their_own() -> None:
    """The dead machine's connections are closed, so its peers fail within seconds."""
    life = training()
    life.cluster.gang.peers_hang = False
    node = life.node_of(2)
    node.dead = True
    life.run(LEASE_SECONDS - 5)
    assert life.status.restart_round == 0
    text = " ".join(c.message for c in life.status.conditions)
    assert "connection closed by peer" in text and "has not answered since" in text
    life.run(LONG)
    assert one_round(life)
    assert life.status.last_recovery.reason == "NodeLost"
    assert counting(life.status) == 0


def test_a_sidecar_that_is_silent_on_a_good_node_delays_failed_ranks_for_a_while_only() -> None:
    life = training()
    life.silence(3)
    life.rank_dies()
    life.run(LEASE_SECONDS * 2, until=begun)
    assert life.status.restart_round == 1
    assert life.status.last_recovery.reason == "RankFailed"


def one_round(life: Life) -> bool:
    assert life.status.is_true("Running")
    assert broken_rules(life.cluster, life.copies) == []
    return life.status.restart_round == 1 and life.status.restarts == 1


@pytest.mark.fault("A node is dead, cut off, or its Node object is deleted")
@pytest.mark.parametrize("fault", ["dead", "cut_off", "deleted"])
def test_a_lost_node_costs_one_round(fault: str) -> None:
    life = training()
    node = life.node_of(2)
    setattr(node, fault, True)
    life.run(LONG)
    assert one_round(life)
    assert life.status.members == (0, 0, 1, 0)
    assert life.node_of(2) is not node


@pytest.mark.fault("Several nodes are lost at once")
def test_several_nodes_that_are_lost_at_once_cost_one_round() -> None:
    life = training(copies=2)
    lost = [life.node_of(1), life.node_of(2)]
    for node in lost:
        node.dead = True
    life.run(LONG)
    assert one_round(life)
    assert life.node_of(1) not in lost and life.node_of(2) not in lost


@pytest.mark.fault("A second node is lost while the first still takes pods")
def test_two_nodes_lost_one_after_another_cost_two_rounds() -> None:
    """The second replacement also avoids the first node, whose pod was deleted long before."""
    life = training()
    first, second = life.node_of(1), life.node_of(2)
    first.dead = True
    life.run(LEASE_SECONDS + 10)
    assert life.status.is_true("Running")
    life.rank_dies()
    life.cluster.lose_pod(life.pod(2))
    second.dead = True
    life.run(LONG)
    assert life.status.is_true("Running")
    assert life.status.restart_round == 2
    assert life.node_of(2) not in (first, second)


@pytest.mark.fault("A replacement was bound to the dead node before the loss was noticed")
@pytest.mark.parametrize("restarts", [False, True], ids=["same operator", "operator restarts"])
def test_a_pod_that_was_bound_before_the_loss_was_noticed(restarts: bool) -> None:
    """The pod never starts on the lost node. It is created again in its round, which has a restore point."""
    life = training()
    node = life.node_of(2)
    node.dead = True
    life.cluster.lose_pod(life.pod(2))
    life.run(AT_ONCE, until=chosen)
    assert life.node_of(2) is node, "the scheduler does not know yet"
    if restarts:
        life.restart()
    life.run(LONG)
    assert one_round(life)
    assert life.node_of(2) is not node


@pytest.mark.fault("The operator restarts in the round of a lost node")
@pytest.mark.parametrize("reached", [begun, chosen], ids=["before the pod", "after the choice"])
def test_an_operator_that_restarts_in_the_round_forgets_no_lost_node(
    reached: Callable[[TrainingJobStatus], bool],
) -> None:
    life = training()
    node = life.node_of(2)
    node.dead = True
    life.run(LEASE_SECONDS * 2, until=reached)
    life.restart()
    life.run(LONG)
    assert one_round(life)
    assert life.node_of(2) is not node


@pytest.mark.fault("The lost node is the only one that fits, and returns")
def test_a_job_that_fits_on_the_lost_node_only_waits_and_uses_it_when_it_returns() -> None:
    """The affinity of a pod cannot change: without a new pod, the job would wait for ever."""
    life = training()
    lost = only_node_that_fits(life, 2)
    lost.cut_off = True
    life.run(TAINT_SECONDS - 5)
    assert waiting_pod(life, 2).avoided_nodes == {lost.name}
    running = life.status.condition(JobCondition.RUNNING)
    assert "0/6 nodes are available" in running.message and lost.name in running.message
    life.run(LONG)
    assert life.status.restart_round == 1
    writes = writes_of_pods(life)
    life.run(LONG)
    assert waiting_pod(life, 2).node is None
    assert writes_of_pods(life) == writes
    lost.cut_off = False
    life.run(30)
    assert one_round(life)
    assert life.node_of(2) is lost


@pytest.mark.fault("The operator restarts while a pod waits for other nodes")
def test_a_waiting_pod_outlives_an_operator_that_restarts() -> None:
    """The new process has not observed the age of any lease. It must not let the pod use the dead node."""
    life = training()
    lost = only_node_that_fits(life, 2)
    lost.dead = True
    life.run(LEASE_SECONDS + 5)
    before = waiting_pod(life, 2)
    assert before.avoided_nodes == {lost.name}
    life.restart()
    life.run(TAINT_SECONDS - lost.silent_ticks - 1)
    assert waiting_pod(life, 2).uid == before.uid
    life.run(LONG)
    assert waiting_pod(life, 2).node is None


@pytest.mark.fault("A lost node has been tainted, and Karpenter must add a node")
@pytest.mark.parametrize("restarts", [False, True], ids=["same operator", "operator restarts"])
def test_a_waiting_pod_stops_excluding_a_node_that_kubernetes_has_tainted(restarts: bool) -> None:
    """Karpenter adds no node for a pod that excludes nodes by name, so the job would wait for ever."""
    life = training()
    lost = only_node_that_fits(life, 2)
    lost.dead = True
    life.run(LEASE_SECONDS + 5)
    before = waiting_pod(life, 2)
    assert before.avoided_nodes == {lost.name}
    if restarts:
        life.restart()
    life.run(LONG)
    after = waiting_pod(life, 2)
    assert (after.name, after.avoided_nodes) == (before.name, frozenset())
    assert after.uid != before.uid
    writes = writes_of_pods(life)
    life.run(LONG)
    assert writes_of_pods(life) == writes, "it is created again once"
    life.cluster.nodes["added"] = FakeNode("added")
    life.run(30)
    assert one_round(life)
    assert life.node_of(2).name == "added"


@pytest.mark.fault("A Node object of a machine that died long ago stays")
def test_a_node_that_died_long_ago_is_not_excluded() -> None:
    """Kubernetes keeps pods off the node, and its Node object may stay for ever."""
    life = training()
    old = next(n for n in life.cluster.nodes.values() if n.name not in bound_nodes(life))
    old.dead = True
    life.run(LONG)
    assert life.status.restart_round == 0
    life.cluster.full_nodes = set(life.cluster.nodes)
    life.cluster.lose_pod(life.pod(2))
    life.run(10)
    assert life.status.restart_round == 1
    assert waiting_pod(life, 2).avoided_nodes == frozenset()


@pytest.mark.fault("A pod that tolerates all taints loses its node")
def test_a_pod_that_tolerates_the_taint_of_a_lost_node_costs_one_round() -> None:
    """The scheduler may place such a pod on the dead node at any time."""
    life = training(tolerations=[{"operator": "Exists"}])
    node = life.node_of(2)
    node.dead = True
    life.run(LONG)
    assert one_round(life)
    assert life.node_of(2) is not node


@pytest.mark.fault("An admission plug-in lets pods onto lost nodes")
def test_a_pod_with_tolerations_of_an_admission_plugin_is_not_created_again_and_again() -> None:
    """The template does not contain the tolerations. Only the pods show that they may be placed on a dead
    node."""
    life = training()
    life.cluster.added_tolerations = [{"operator": "Exists"}]
    # The pod that is created again shows the toleration.
    life.cluster.fail_pod(life.pod(0), "Error")
    life.run(60)
    lost = only_node_that_fits(life, 2)
    lost.dead = True
    life.run(LONG)
    writes = writes_of_pods(life)
    life.run(LONG)
    assert writes_of_pods(life) == writes


@pytest.mark.fault("A round begins while a pod waits for other nodes")
def test_a_round_that_begins_while_a_pod_waits_creates_it_again() -> None:
    """A pod of an earlier round could not be created again under its name when its node returns."""
    life = training()
    lost = only_node_that_fits(life, 2)
    lost.cut_off = True
    life.run(LEASE_SECONDS + 5)
    life.cluster.fail_pod(life.pod(0), "Error")
    life.cluster.full_nodes.discard(life.node_of(0).name)
    life.run(30)
    assert life.status.restart_round == 2
    assert life.status.members == (2, 0, 2, 0)
    lost.cut_off = False
    life.run(40)
    assert life.status.is_true("Running")
    assert life.status.restart_round == 2


@pytest.mark.fault("The template names the lost node, or the scheduler ignores affinities")
def test_a_pod_that_names_its_node_waits_there() -> None:
    """With spec.nodeName in the template, no scheduler reads an affinity, and no new pod helps."""
    life = training()
    node = life.node_of(2)
    life.cluster.job["spec"]["template"]["spec"]["nodeName"] = node.name
    life.cluster.touch_job()
    node.cut_off = True
    life.run(LONG)
    assert life.status.restart_round == 1
    writes = writes_of_pods(life)
    life.run(LONG)
    assert writes_of_pods(life) == writes
    node.cut_off = False
    life.run(30)
    assert one_round(life)


@pytest.mark.fault("A node that was lost is in use again")
def test_a_node_that_was_lost_and_came_back_is_used_again() -> None:
    life = training()
    node = life.node_of(2)
    node.cut_off = True
    life.run(LONG)
    assert one_round(life)
    node.cut_off = False
    life.run(10)
    life.cluster.lose_pod(life.pod(2))
    life.run(15)
    assert life.status.is_true("Running")
    assert life.node_of(2) is node, "the emptiest node with the lowest name"


@pytest.mark.fault(
    "The leases of most nodes are late at the same time, because the API server or the operator is "
    "slow"
)
def test_a_slow_api_server_and_a_sidecar_that_does_not_answer_restart_no_gang() -> None:
    """The API server does not take the renewals of most nodes, and the operator's calls end too early."""
    life, most = training_on_many_nodes()
    for node in most:
        node.cut_off = True
    life.run(TAINT_SECONDS - 5)
    for node in most:
        node.cut_off = False
    life.run(30)
    assert life.status.restart_round == 0
    assert life.status.is_true("Running")


@pytest.mark.fault(
    "The leases of most nodes are late at the same time, because the API server or the operator is "
    "slow"
)
def test_the_loss_of_most_nodes_is_found_by_their_taints() -> None:
    life, most = training_on_many_nodes()
    lost = life.node_of(2)
    for node in most:
        node.dead = True
    life.run(LONG)
    assert one_round(life)
    assert life.node_of(2) is not lost
