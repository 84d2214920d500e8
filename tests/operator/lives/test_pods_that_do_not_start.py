"""Pods that have a node and never start are named, and created again on another node."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import NAMESPACE
from tests.support.operator.life import Life

from holdfast_operator.model.job import PodView

VOLUMES = [
    {"name": "data", "persistentVolumeClaim": {"claimName": "training-data"}},
    {"name": "token", "secret": {"secretName": "hub-token"}},
]
TIME_OUT = 120


def stuck_life() -> Life:
    """Return a life whose pods mount a claim and a Secret, and do not start on node-1."""
    life = Life()
    life.change_spec(startTimeoutSeconds=TIME_OUT)
    life.cluster.job["spec"]["template"]["spec"]["volumes"] = VOLUMES
    secret = {"name": "hub-token", "namespace": NAMESPACE, "uid": "secret"}
    life.cluster.api.put("secrets", {"metadata": secret, "data": {"token": "eA=="}})
    life.cluster.stuck_nodes = {"node-1"}
    return life


def stuck_pods(life: Life) -> list[PodView]:
    return [p.view for p in life.cluster.pods.values() if p.view.node == "node-1"]


def test_a_pod_that_does_not_start_is_named_with_its_node_and_what_it_mounts() -> None:
    life = stuck_life()
    life.run(60)
    [stuck] = stuck_pods(life)
    running = life.status.condition("Running")
    assert running.is_false
    for part in (
        f"{stuck.name} on node node-1",
        "ContainerCreating",
        "PersistentVolumeClaim training-data",
        "Secret hub-token",
    ):
        assert part in running.message


def test_a_normal_start_is_not_named() -> None:
    life = stuck_life()
    life.run(20)
    assert "node-1" not in life.status.condition("Running").message


@pytest.mark.fault("A pod has a node and never starts")
def test_it_is_created_again_on_another_node_in_the_same_round() -> None:
    life = stuck_life()
    life.run(TIME_OUT + 60, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
    assert life.status.restart_round == 0
    assert not stuck_pods(life)
    [text] = [e.message for e in life.operator.events if e.reason == "PodNotStarted"]
    assert f"for more than {TIME_OUT} s" in text
    assert "avoid node-1" in text
    assert "30 s" not in text


@pytest.mark.fault("No pod starts on any of the nodes of a gang, and other nodes would start them")
def test_a_gang_whose_only_nodes_start_no_pod_goes_on_elsewhere() -> None:
    """A gang of two nodes cannot tell a bad node from a bad claim, so one node is left first."""
    life = stuck_life()
    life.cluster.pods_per_node = 2
    life.cluster.full_nodes = {f"node-{n}" for n in range(2, 6)}
    life.cluster.stuck_nodes = {"node-0", "node-1"}
    life.run(10)
    assert {p.view.node for p in life.cluster.pods.values()} == {"node-0", "node-1"}
    life.cluster.full_nodes = set()
    life.run(4 * TIME_OUT, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
    assert life.status.restart_round == 0, "no container had run, so it costs no round"


@pytest.mark.fault("No pod starts on any of the nodes of a gang, and other nodes would start them")
def test_a_cause_that_all_nodes_share_moves_the_pods_of_one_node_only() -> None:
    life = stuck_life()
    life.cluster.stuck_nodes = set(life.cluster.nodes)
    life.run(4 * TIME_OUT)
    assert "the cause is probably no node" in life.status.condition("Running").message
    assert len({f.node for f in life.status.node_failures}) == 1


def test_a_recovery_does_not_wait_for_ever_either() -> None:
    life = stuck_life()
    life.cluster.stuck_nodes = set()
    life.run(60, until=lambda s: s.last_replicated_step == 20)
    life.run_until_committed()
    life.cluster.stuck_nodes = {n for n in life.cluster.nodes if n not in ("node-0", "node-5")}
    life.cluster.lose_pod(life.pod(1))
    life.run(4 * TIME_OUT, until=lambda s: s.restart_round == 1 and s.is_true("Running"))
    assert life.status.is_true("Running")
    assert life.status.restart_round == 1


def test_if_no_node_is_left_all_nodes_are_tried_again() -> None:
    """The cause may be a claim that does not exist, which no other node has either."""
    life = stuck_life()
    life.cluster.stuck_nodes = set(life.cluster.nodes)
    life.run(10 * TIME_OUT)
    life.cluster.stuck_nodes = set()
    life.run(2 * TIME_OUT, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")


def test_without_a_time_out_the_pod_waits() -> None:
    life = stuck_life()
    life.change_spec(startTimeoutSeconds=0)
    life.run(4 * TIME_OUT)
    assert len(stuck_pods(life)) == 1
