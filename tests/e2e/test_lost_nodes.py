"""Nodes that die, freeze or leave an elastic gang, and nodes whose pods the operator or store cannot reach.

The tests of this file run one after the other, because a process of a parallel run gets whole files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from testbed import faults
from testbed.driver.jobs import Job
from testbed.driver.kube import Kube, condition
from testbed.driver.same_bits import SameBits
from testbed.driver.scenario import SHORT

pytestmark = pytest.mark.node_faults
_LABEL = "example.com/elastic-pool"


@pytest.fixture
def as_many_nodes_as_workers(scenario) -> Iterator[None]:
    """Leave one worker on each node that takes pods.

    Kubernetes keeps a dead node schedulable for about 40 seconds. The gang's topology spread then prefers
    that node, because it is the only one without another worker.
    """
    with faults.cordoned(*scenario.nodes[SHORT.workers :]):
        yield


@pytest.fixture
def two_nodes(scenario) -> Iterator[None]:
    """Leave two nodes that take pods."""
    with faults.cordoned(*scenario.nodes[2:]):
        yield


@pytest.mark.fault("A node is killed on a real cluster")
def test_a_killed_node_costs_one_round(scenario, as_many_nodes_as_workers, nodes_back):
    job = scenario.start()
    job.wait_step(25)
    nodes = {worker: job.node_of(worker) for worker in range(SHORT.workers)}
    assert len(set(nodes.values())) == len(nodes), f"one worker on each node, found {nodes}"
    faults.kill_node(nodes[2])
    job.wait_round(1)
    assert job.status["members"] == [0, 0, 1], "one round, in which worker 2 alone is replaced"
    assert job.node_of(2) != nodes[2]
    scenario.finish_and_judge(job)
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
    job.wait_round(round_ + 1)
    assert job.node_of(1) != node, "worker 1 has another node"
    restore(node)


def test_a_paused_node_is_replaced_and_does_no_harm_when_it_returns(scenario, nodes_back):
    """A frozen node first returns while the gang waits for it, and then after its pod was replaced."""
    slow = replace(SHORT, sleep_per_step=0.5)  # both faults must hit the run
    job = scenario.start(slow, suspect_after_seconds=600)  # a survivor that is late is not lost
    job.wait_replicated(20)
    _choice_waits_for_a_survivor_that_answers_late(job)
    suspect = {"spec": {"nodeLoss": {"suspectAfterSeconds": 20}}}
    job.kube.patch(job.KIND, job.namespace, job.name, suspect)
    _loses_and_returns(job, faults.pause_node, faults.unpause_node)
    scenario.finish_and_judge(job)


def _choice_waits_for_a_survivor_that_answers_late(job: Job) -> None:
    """Freeze the node of one survivor while another pod is lost, until round 1 has begun.

    The operator must treat the survivor's inventory as unknown, not as empty.
    """
    late = job.node_of(0)
    pods = job.pod_uids()
    lost = pods.pop(job.pod_name(1))
    faults.pause_node(late)
    job.kube.delete_pod(job.namespace, job.pod_name(1), grace_seconds=0)
    job.wait("round 1", lambda: job.round >= 1)
    faults.unpause_node(late)
    job.wait_round(1)
    left = set(job.pod_uids().values())
    assert left >= set(pods.values()) and lost not in left, "the late survivor was kept"
    assert job.status["restorePoint"]["step"] >= 20, "the steps of the late survivor counted"


@pytest.mark.fault("A node is cut off from all others on a real cluster, and comes back")
@pytest.mark.long
def test_a_partitioned_node_is_replaced_and_does_no_harm_when_it_rejoins(scenario, nodes_back):
    """The ranks of the partitioned node run on, and reach neither the gang nor the API server."""
    job = scenario.start()
    job.wait_step(25)
    _loses_and_returns(job, faults.partition_node, faults.rejoin_node)
    scenario.finish_and_judge(job)


@pytest.mark.fault("A machine is taken away and its Node object deleted, on a real cluster")
@pytest.mark.fault("A Node object is deleted while its sidecar is silent, on a real API server")
@pytest.mark.long
def test_a_node_whose_object_is_deleted_is_lost(scenario, as_many_nodes_as_workers, nodes_back):
    """A cluster autoscaler takes the machine away and deletes its Node object."""
    job = scenario.start()
    job.wait_step(25)
    node = job.node_of(2)
    faults.kill_node(node)
    scenario.kube.core.delete_node(node)
    job.wait_round(1)
    assert job.status["members"] == [0, 0, 1], "worker 2 alone is replaced"
    assert job.status["recoveries"][-1]["reason"] == "NodeLost"
    scenario.finish_and_judge(job)


@pytest.mark.fault("A node is killed while its pod has a volume of a storage class")
def test_a_worker_with_a_volume_on_a_killed_node_is_replaced_on_another(
    scenario, storage_class, nodes_back
):
    job = scenario.start(node_class=storage_class)
    job.wait_replicated(20)
    node = job.node_of(1)
    faults.kill_node(node)
    job.wait_round(1)
    assert job.node_of(1) != node
    scenario.finish_and_judge(job)


@pytest.mark.fault("Every sidecar is silent on a real cluster")
def test_silence_of_all_sidecars_deletes_no_pod(scenario, nodes_back):
    """A pod is lost while no sidecar answers. The survivors hold the only copies and must not be deleted."""
    job = scenario.start(object_every=None)
    job.wait_step(25)
    survivors = {name: uid for name, uid in job.pod_uids().items() if name != job.pod_name(1)}
    with faults.sidecars_silent(scenario.nodes):
        scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
        unreachable = job.wait_condition("SidecarsUnreachable")
        assert "7070" in unreachable["message"], "the message names the port that was tried"
        assert survivors.items() <= job.pod_uids().items()
    job.wait_condition("SidecarsUnreachable", "False")
    job.wait_round(1)
    assert survivors.items() <= job.pod_uids().items()
    assert job.status["restorePoint"]["step"] >= 20, "the committed step was restored"
    scenario.finish_and_judge(job)


def test_training_continues_while_the_store_is_down(scenario):
    """Only the pods on the nodes of this test do not reach the store."""
    job = scenario.start()
    job.wait_step(5)
    with faults.store_down(nodes=scenario.nodes):
        step = job.wait_step(30)
        unhealthy = job.wait_condition("RemoteTierHealthy", "False")
        assert unhealthy["message"], "the error of the store or the network"
        assert step >= 30, "training went on"
    job.wait_condition("RemoteTierHealthy")
    scenario.finish_and_judge(job)


def _is_waiting_for(job: Job, reason: str) -> bool:
    return condition(job.read(), "Running").get("reason") == reason


def test_a_young_job_that_lost_everything_starts_over_by_itself(scenario, two_nodes):
    """While the store is away, it may have a checkpoint: the gang waits for its answer."""
    slow = replace(SHORT, sleep_per_step=0.8)  # the pods must be lost during the run
    with faults.store_down(nodes=scenario.nodes):
        job = scenario.start(slow)
        job.wait_replicated(10)
        job.wait("the commit in the status", lambda: "lastCommittedStep" in job.status)
        job.lose_a_shard_and_its_copy()
        job.wait("the store's answer", lambda: _is_waiting_for(job, "WaitingForStore"))
    job.wait_round(1)
    assert job.status["lineage"] == [{"round": job.round}], "it has no restore point"
    assert job.status["recoveries"][-1]["lostSteps"] >= 10
    job.wait(
        "the Event of the start over",
        lambda: "StartedOver" in {e["reason"] for e in job.kube.events(job.namespace)},
    )
    scenario.finish_and_judge(job)


# -------------------------------------------------- an elastic gang


@contextmanager
def _labelled(kube: Kube, nodes: Sequence[str]) -> Iterator[None]:
    """Label the nodes during the block."""
    try:
        for name in nodes:
            _in_pool(kube, name, True)
        yield
    finally:
        for name in nodes:
            _in_pool(kube, name, False)


def _in_pool(kube: Kube, node: str, is_in: bool) -> None:
    value = "yes" if is_in else None
    kube.core.patch_node(node, {"metadata": {"labels": {_LABEL: value}}})


def _placeholders(scenario) -> list[str]:
    names = (pod["metadata"]["name"] for pod in scenario.kube.pods(scenario.namespace))
    return [name for name in names if "placeholder" in name]


def _wait_workers(job, workers: int, reason: str) -> None:
    def trains() -> bool:
        status = job.status
        conditions = {c["type"]: c for c in status.get("conditions", [])}
        record = (status.get("recoveries") or [{}])[-1]
        running = conditions["Running"]["status"] == "True"
        return running and len(status["members"]) == workers and record.get("reason") == reason

    job.wait(f"training with {workers} workers", trains)


@pytest.mark.long
def test_an_elastic_gang_continues_without_a_node_and_grows_when_it_is_back(scenario):
    training = SameBits(workers=3, steps=700, sleep_per_step=0.15)
    apart = {
        "labelSelector": {"matchExpressions": [{"key": "holdfast.dev/job", "operator": "Exists"}]},
        "topologyKey": "kubernetes.io/hostname",
    }
    pod = {
        "nodeSelector": {_LABEL: "yes"},
        "affinity": {
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        },
    }
    elastic = {"elastic": {"min": 2, "shrinkAfterSeconds": 30, "growAfterSeconds": 60}}
    with _labelled(scenario.kube, scenario.nodes[:3]):
        job = scenario.start(training, interval=20, object_every=20, more=elastic, pod=pod)
        job.wait_step(20)
        node = job.node_of(1)
        job.wait_persisted(40)
        _in_pool(scenario.kube, node, False)
        scenario.kube.delete_pod(scenario.namespace, job.pod_name(1))
        _wait_workers(job, 2, "Shrunk")
        job.wait("two ready workers", lambda: job.status["readyWorkers"] == "2/3")
        missing = job.wait_condition("WorkersMissing")
        assert missing["reason"] == "Shrunk"
        job.wait("a placeholder", lambda: _placeholders(scenario))
        _in_pool(scenario.kube, node, True)
        _wait_workers(job, 3, "Grown")
        assert job.status["restarts"] == 1, "only the lost pod counts"
        job.wait("the end of the placeholders", lambda: not _placeholders(scenario))
        scenario.finish_and_judge(job, training)
