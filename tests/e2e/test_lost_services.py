"""Loss of the operator, during which training continues, beside pods that pretend to belong to the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from testbed.driver import install
from testbed.driver.jobs import TRAINER_IMAGE, Job
from testbed.driver.kube import Kube, Object, wait_for
from testbed.driver.scenario import SHORT


@pytest.fixture
def strangers(installed: Kube, namespace: str, pool: str) -> Iterator[str]:
    """Return a namespace of another tenant."""
    with installed.new_namespace(f"{namespace}-stranger", pool=pool) as name:
        yield name


def _forged(job: Job, genuine: Object, namespace: str, name: str, birth_round: int) -> Object:
    """Return a pod with the labels of a worker, which no TrainingJob owns."""
    labels = {**genuine["metadata"]["labels"], "holdfast.dev/birth-round": str(birth_round)}
    sleeper = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "3600"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [sleeper], "automountServiceAccountToken": False},
    }


def _forge_pods(job: Job, kube: Kube, strangers: str) -> None:
    """Create pods with the labels of the job's workers: six in another namespace, three beside the job's."""
    for worker in range(3):
        pod = kube.pod(job.namespace, job.pod_name(worker))
        assert pod is not None
        for birth_round in (0, 7):
            name = f"{job.name}-{worker}-r{birth_round}"
            forged = _forged(job, pod, strangers, name, birth_round)
            kube.core.create_namespaced_pod(strangers, forged)
        forged = _forged(job, pod, job.namespace, f"forged-{worker}", 7)
        kube.core.create_namespaced_pod(job.namespace, forged)


def _own_pods(job: Job) -> set[tuple[str, str]]:
    """Return name and uid of each pod of the job that is not forged."""
    return {(name, uid) for name, uid in job.pod_uids().items() if not name.startswith("forged-")}


@pytest.mark.fault("A user creates forged pods on a real cluster")
@pytest.mark.fault(
    "A user creates forged pods on a real API server, over a restart of the operator"
)
@pytest.mark.alone
def test_a_recovery_continues_after_the_operator_is_killed(
    scenario, installed: Kube, strangers: str
):
    """The operator is killed after CAS 1, after the seal, and after CAS 2. Its successor continues.

    Forged pods neither stop nor destroy the job.
    """
    # Ranks may train on for 15 s while no operator leads, and the last loss must hit the run, too.
    job = scenario.start(replace(SHORT, sleep_per_step=0.7))
    phases = {
        "CAS 1": lambda before: job.round > before,
        "the seal": lambda before: job.metric(0, "holdfast_restart_round").get("", 0) > before,
        "CAS 2": lambda before: job.round > before and "restorePoint" in job.status,
    }
    job.wait_step(10)
    _forge_pods(job, installed, strangers)
    for name, reached in phases.items():
        job.wait_step(job.live_step() + 10)
        before = job.round
        members = _own_pods(job)
        scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
        wait_for(
            name,
            lambda r=reached, b=before: r(b),
            describe=job.describe,
            every_seconds=0.02,
        )
        install.kill_operator(installed)
        job.wait_round(before + 1)
        assert len(_own_pods(job) & members) == 2, "two survivors are kept"
    assert len(installed.pods(strangers)) == 6, "pods of the other tenant are left alone"
    for worker in range(3):
        scenario.kube.delete_pod(scenario.namespace, f"forged-{worker}", grace_seconds=0)
    scenario.finish_and_judge(job)
