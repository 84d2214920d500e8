"""Pods that are lost while Helm replaces the operator: during an upgrade, and during a rollback.

The upgraded chart deploys another tag of the same operator image, so Kubernetes replaces the operator's pod
as in any upgrade. Another version of the operator's code is not tried here: what newer and older versions
read and write is compared in tests/integration/operator/test_upgrades.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from testbed import cluster
from testbed.config import CONTROL_PLANE, current_bed
from testbed.driver import install
from testbed.driver.jobs import Job
from testbed.driver.kube import Kube, show, wait_for
from testbed.driver.scenario import SHORT

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("installed_again")]

NEXT = "next"
"""The tag of the upgraded chart's operator image."""
PATIENT = replace(SHORT, steps=250, sleep_per_step=0.3)
"""Still training when the second pod is lost: about 45 s are left when the rollback begins."""


@pytest.fixture
def next_image() -> None:
    """Give the operator's image a second tag on the node where the operator runs."""
    names = [f"docker.io/{install.VALUES['operator.image.repository']}:{t}" for t in ("dev", NEXT)]
    tag = f"ctr -n k8s.io images tag --force {' '.join(names)}"
    cluster.in_node(current_bed(), CONTROL_PLANE, tag)


def operator_tags(kube: Kube) -> set[str]:
    """Return the tags of the image with which operator pods exist, running or not."""
    pods = kube.pods(install.NAMESPACE, "app.kubernetes.io/name=holdfast")
    return {pod["spec"]["containers"][0]["image"].rpartition(":")[2] for pod in pods}


def lose_a_pod_during(change: Callable[[], str], tag: str, job: Job, worker: int) -> int:
    """Delete a pod of the job as soon as Helm has created the operator pod with this tag.

    Returns:
        The newest step of which peers had copies before the pod was lost.
    """
    before = job.round
    replicated = job.live_step('holdfast_committed_step{level="replicated"')
    assert operator_tags(job.kube).isdisjoint({tag})
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(change)
        wait_for(
            f"an operator pod with tag {tag}",
            lambda: tag in operator_tags(job.kube),
            describe=lambda: show(job.kube.pods(install.NAMESPACE)),
            every_seconds=0.02,
        )
        job.kube.delete_pod(job.namespace, job.pod_name(worker), grace_seconds=1)
        changed.result()
    job.wait_round(before + 1)
    wait_for(
        f"no operator pod but those with tag {tag}",
        lambda: operator_tags(job.kube) == {tag},
        describe=lambda: show(job.kube.pods(install.NAMESPACE)),
    )
    return replicated


@pytest.mark.fault(
    "Pods are lost while Helm replaces the operator, in an upgrade and in a rollback"
)
@pytest.mark.long
def test_a_job_loses_pods_during_an_upgrade_and_during_the_rollback(
    scenario, installed: Kube, next_image: None
):
    job = scenario.start(PATIENT)
    job.wait_replicated(20)
    first = install.revision()
    promised = [
        lose_a_pod_during(
            lambda: install.upgrade("--set-string", f"operator.image.tag={NEXT}"), NEXT, job, 1
        )
    ]
    assert install.revision() == first + 1
    job.wait_replicated(promised[0] + 40)
    back = ("rollback", install.RELEASE, str(first), *install.WAIT)
    promised.append(lose_a_pod_during(lambda: install.helm(*back), "dev", job, 2))
    assert install.revision() == first + 2
    assert job.status["members"] == [0, 1, 2], "only the lost workers have new pods"

    job.wait_complete()
    recoveries = job.status["recoveries"]
    assert [r["workers"] for r in recoveries] == [[1], [2]]
    for recovery, step in zip(recoveries, promised, strict=True):
        assert recovery["restoredStep"] >= step, "a step with copies on peers is never lost"
        print({k: recovery.get(k) for k in ("restoredStep", "lostSteps", "totalSeconds")}, step)
    scenario.finish_and_judge(job, PATIENT)
