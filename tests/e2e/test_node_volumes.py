"""Node tiers on volumes of storage classes: a lost pod, a claim without a volume."""

from __future__ import annotations

import pytest
from testbed.driver.kube import condition, wait_for
from testbed.driver.local_volumes import files_of


@pytest.mark.fault("A pod whose node tier is on a volume of a storage class is lost")
def test_a_gang_that_saves_to_volumes_of_a_class_survives_a_lost_pod(scenario, storage_class):
    job = scenario.start(node_class=storage_class)
    job.wait_replicated(20)
    files = files_of(storage_class, "rank*.shard", scenario.nodes)
    assert any(files.values()), files
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
    job.wait_round(1)
    [recovery] = job.status["recoveries"]
    # A peer that has not received ROUND yet refuses, and the store is asked at once.
    assert recovery["sources"].keys() & {"peer", "object"}, "the volumes went with the pod"
    scenario.finish_and_judge(job)

    def claims() -> list[str]:
        core = scenario.kube.core
        found = core.list_namespaced_persistent_volume_claim(scenario.namespace).items
        return [claim.metadata.name for claim in found]

    wait_for(
        "the claims to end with their pods",
        lambda: not claims(),
        describe=lambda: str(claims()),
    )


@pytest.mark.fault("The claim of a pod finds no volume")
def test_a_claim_that_finds_no_volume_is_reported(scenario):
    job = scenario.start(node_class="e2e-missing-class")

    def reported() -> str | None:
        found = condition(job.read(), "Running")
        message: str = found.get("message", "")
        return message if "PersistentVolumeClaim" in message else None

    message = job.wait("the scheduler's message about the claim", reported)
    pod = job.pod_name(0)
    for part in (
        f"pod {pod} is not scheduled",
        f"{pod}-holdfast-node of storage class e2e-missing-class",
        f"kubectl describe pvc -n {scenario.namespace}",
    ):
        assert part in message
