"""An elastic gang loses a worker's node, continues with fewer workers, and grows when the node is back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from testbed.driver.kube import Kube
from testbed.driver.same_bits import SameBits

POOL = "example.com/elastic-pool"


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
    kube.core.patch_node(node, {"metadata": {"labels": {POOL: value}}})


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
@pytest.mark.node_faults
def test_an_elastic_gang_continues_without_a_node_and_grows_when_it_is_back(scenario):
    training = SameBits(workers=3, steps=700, sleep_per_step=0.15)
    apart = {
        "labelSelector": {"matchExpressions": [{"key": "holdfast.dev/job", "operator": "Exists"}]},
        "topologyKey": "kubernetes.io/hostname",
    }
    pod = {
        "nodeSelector": {POOL: "yes"},
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
