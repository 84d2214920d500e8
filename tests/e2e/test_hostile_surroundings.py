"""Pods that pretend to belong to a job, and a name used twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from testbed.driver import install
from testbed.driver.jobs import TRAINER_IMAGE, Job
from testbed.driver.kube import Kube, Object, wait_for


@pytest.fixture
def strangers(installed: Kube, namespace: str) -> Iterator[str]:
    """Return a namespace of another tenant."""
    name = f"{namespace}-stranger"
    installed.ensure_namespace(name)
    yield name
    installed.delete_namespace(name)


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


@pytest.mark.alone
def test_forged_pods_neither_stop_nor_destroy_a_job(scenario, installed: Kube, strangers: str):
    job = scenario.start()
    job.wait_step(15)
    genuine = job.pod_uids()
    for worker in range(3):
        pod = installed.pod(scenario.namespace, job.pod_name(worker))
        assert pod is not None
        for birth_round in (0, 7):
            name = f"{job.name}-{worker}-r{birth_round}"
            forged = _forged(job, pod, strangers, name, birth_round)
            installed.core.create_namespaced_pod(strangers, forged)
        forged = _forged(job, pod, scenario.namespace, f"forged-{worker}", 7)
        installed.core.create_namespaced_pod(scenario.namespace, forged)
    install.kill_operator(installed)
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
    job.wait_round(1, 180)
    kept = {name: uid for name, uid in job.pod_uids().items() if name in genuine}
    assert len(set(kept.items()) & set(genuine.items())) == 2, "the two survivors were kept"
    assert len(installed.pods(strangers)) == 6, "pods of the other tenant were left alone"
    for worker in range(3):
        scenario.kube.delete_pod(scenario.namespace, f"forged-{worker}", grace_seconds=0)
    scenario.finish_and_judge(job)


def test_a_job_created_again_under_the_same_name_completes(scenario):
    """The first job's Checkpoints are retained. The new job has the same name, steps and round."""
    first = scenario.start()
    first.wait_persisted(20)
    uid = first.uid
    first.close()
    scenario.kube.delete("TrainingJob", scenario.namespace, first.name)
    wait_for(
        "the first job's object to go",
        lambda: scenario.kube.get("TrainingJob", scenario.namespace, first.name) is None,
        timeout_seconds=60,
    )
    kept = {c["metadata"]["name"] for c in scenario.kube.items("Checkpoint", scenario.namespace)}
    assert kept, "the deletion retains the first job's Checkpoints"
    second = scenario.start()
    assert second.uid != uid
    second.wait_persisted(40)
    scenario.finish_and_judge(second)
    now = {c["metadata"]["name"] for c in scenario.kube.items("Checkpoint", scenario.namespace)}
    assert kept <= now, "the second job left the first one's Checkpoints alone"
