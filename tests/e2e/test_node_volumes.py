"""Node tiers on volumes of storage classes: several volumes, lost pods and nodes, claims without a volume."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testbed import faults
from testbed.driver.kube import condition
from testbed.driver.local_volumes import files_of, local_volumes

CLASSES = ("e2e-nvme-a", "e2e-nvme-b")


@pytest.fixture
def volumes(installed) -> Iterator[None]:
    with local_volumes(installed, CLASSES):
        yield


def test_a_gang_that_saves_to_two_volumes_survives_a_lost_pod(scenario, volumes):
    job = scenario.start(node_classes=CLASSES)
    job.wait_replicated(20)
    for number, name in enumerate(CLASSES):
        files = files_of(scenario.kube, name, "rank*.shard")
        paths = [path for found in files.values() for path in found]
        ranks = {int(path.rsplit("/rank", 1)[1][:6]) for path in paths}
        assert ranks and all(rank % 2 == number for rank in ranks), paths
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
    job.wait_round(1)
    assert job.status["restorePoint"]["sources"]["peer"] == 1, "the volumes went with the pod"
    scenario.finish_and_judge(job)
    claims = scenario.kube.plain(
        scenario.kube.core.list_namespaced_persistent_volume_claim(scenario.namespace)
    )
    assert not claims["items"], "claims end with their pods"


@pytest.mark.alone
def test_a_worker_with_volumes_on_a_killed_node_is_replaced_on_another(
    scenario, volumes, nodes_back
):
    job = scenario.start(node_classes=CLASSES)
    job.wait_replicated(20)
    node = job.node_of(1)
    faults.kill_node(node)
    job.wait_round(1, 150)
    assert job.node_of(1) != node
    scenario.finish_and_judge(job)


def test_a_claim_that_finds_no_volume_is_reported(scenario, volumes):
    job = scenario.start(node_classes=(CLASSES[0], "e2e-missing-class"))

    def reported() -> str | None:
        found = condition(job.read(), "Running")
        message = found.get("message", "")
        return message if "have no node" in message and "olume" in message else None

    message = job.wait("the scheduler's message about the claim", reported, 90)
    assert job.pod_name(0) in message
