"""Nodes that die or freeze."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from testbed import faults
from testbed.driver.jobs import Job
from testbed.driver.scenario import SHORT

pytestmark = pytest.mark.node_faults


ON_EVERY_NODE = replace(SHORT, workers=4)
"""One worker on each node of the pool.

Kubernetes keeps a dead node schedulable for about 40 seconds. The gang's topology spread then prefers that
node, because it is the only one without another worker.
"""


def test_a_killed_node_costs_one_round(scenario, nodes_back):
    job = scenario.start(ON_EVERY_NODE, suspect_after_seconds=20)  # the product's default
    job.wait_step(25)
    nodes = {worker: job.node_of(worker) for worker in range(ON_EVERY_NODE.workers)}
    assert len(set(nodes.values())) == len(nodes), f"one worker on each node, found {nodes}"
    faults.kill_node(nodes[2])
    job.wait_round(1, 150)
    assert job.status["members"] == [0, 0, 1, 0], "one round, in which worker 2 alone is replaced"
    assert job.node_of(2) != nodes[2]
    scenario.finish_and_judge(job, ON_EVERY_NODE)
    rounds = {seen.status.get("restartRound") for seen in job.history} - {None}
    assert rounds == {0, 1}
    recoveries = [r for seen in job.history for r in seen.status.get("recoveries") or []]
    assert {r["reason"] for r in recoveries} == {"NodeLost"}


def _loses_and_returns(
    job: Job, lose: Callable[[str], None], restore: Callable[[str], None]
) -> None:
    """Lose the node of worker 1, and let it come back when the gang has replaced the worker."""
    node, round_ = job.node_of(1), job.round
    lose(node)
    job.wait_round(round_ + 1, 150)
    assert job.node_of(1) != node, "worker 1 has another node"
    restore(node)


def test_a_paused_node_is_replaced_and_does_no_harm_when_it_returns(scenario, nodes_back):
    """A frozen node first returns while the gang waits for it, and then after its pod was replaced."""
    patient = 20  # a node that is frozen for a moment is not lost
    job = scenario.start(replace(SHORT, sleep_per_step=0.2), suspect_after_seconds=patient)
    job.wait_replicated(20)
    _choice_waits_for_a_survivor_that_answers_late(job)
    _loses_and_returns(job, faults.pause_node, faults.unpause_node)
    scenario.finish_and_judge(job)


def _choice_waits_for_a_survivor_that_answers_late(job: Job) -> None:
    """Freeze the node of one survivor while another pod is lost, until round 1 has begun.

    The operator must treat the survivor's inventory as unknown, not as empty.
    """
    late = job.node_of(0)
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in job.pods()}
    lost = pods.pop(job.pod_name(1))
    faults.pause_node(late)
    job.kube.delete_pod(job.namespace, job.pod_name(1), grace_seconds=0)
    job.wait("round 1", lambda: job.round >= 1, 60)
    faults.unpause_node(late)
    job.wait_round(1, 180)
    left = {pod["metadata"]["uid"] for pod in job.pods()}
    assert set(pods.values()) <= left and lost not in left, "the late survivor was kept"
    assert job.status["restorePoint"]["step"] >= 20, "the steps of the late survivor counted"


@pytest.mark.long
def test_a_partitioned_node_is_replaced_and_does_no_harm_when_it_rejoins(scenario, nodes_back):
    """The ranks of the partitioned node run on, and reach neither the gang nor the API server."""
    job = scenario.start()
    job.wait_step(25)
    _loses_and_returns(job, faults.partition_node, faults.rejoin_node)
    scenario.finish_and_judge(job)


@pytest.mark.long
def test_a_node_whose_object_is_deleted_is_lost(scenario, nodes_back):
    """A cluster autoscaler takes the machine away and deletes its Node object."""
    job = scenario.start(ON_EVERY_NODE)
    job.wait_step(25)
    node = job.node_of(2)
    faults.kill_node(node)
    scenario.kube.core.delete_node(node)
    job.wait_round(1, 150)
    assert job.status["members"] == [0, 0, 1, 0], "worker 2 alone is replaced"
    assert job.status["recoveries"][-1]["reason"] == "NodeLost"
    scenario.finish_and_judge(job, ON_EVERY_NODE)
