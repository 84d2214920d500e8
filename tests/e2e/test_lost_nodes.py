"""Nodes that die or freeze: each scenario runs alone, for they carry all jobs."""

from __future__ import annotations

import pytest
from testbed import faults
from testbed.driver.kube import wait_for

pytestmark = pytest.mark.alone


def test_killed_node_is_replaced_from_a_peer(scenario, nodes_back):
    job = scenario.start()
    job.wait_step(25)
    faults.kill_node(job.node_of(2))
    job.wait_round(1, 150)
    first, second, lost = job.status["members"]
    assert (first, second) == (0, 0), "survivors keep their pods"
    assert lost > 0, "the lost worker has a new pod"
    scenario.finish_and_judge(job)


def test_paused_node_is_replaced_and_cannot_harm_when_it_returns(scenario, nodes_back):
    job = scenario.start()
    job.wait_step(25)
    node = job.node_of(1)
    faults.pause_node(node)
    job.wait_round(1, 150)
    faults.unpause_node(node)
    scenario.finish_and_judge(job)


def test_survivor_that_answers_late(scenario, nodes_back):
    """One survivor is frozen while another pod is lost: it is Unknown, not Nothing."""
    job = scenario.start()
    job.wait_step(25)
    late = job.node_of(0)
    victim = job.pod_name(1)
    faults.pause_node(late)
    scenario.kube.delete_pod(scenario.namespace, victim, grace_seconds=0)
    wait_for("round 1", lambda: job.round >= 1, timeout_seconds=60, describe=job.describe)
    faults.unpause_node(late)
    job.wait_round(1, 180)
    scenario.finish_and_judge(job)
