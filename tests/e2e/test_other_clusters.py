"""Checkpoints that this cluster does not know, or that another namespace owns, and jobs that use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml
from testbed.driver.command_line import run_holdfast
from testbed.driver.jobs import Job, job_manifest, prepare_namespace
from testbed.driver.kube import Kube, Object, condition, is_true, show, wait_for
from testbed.driver.oracle import compare_digests
from testbed.driver.scenario import SHORT, Scenario

SLOW = replace(SHORT, sleep_per_step=0.4)  # the source must be deleted during its run


def restorable(kube: Kube, namespace: str) -> list[Object]:
    """Return the Checkpoints from which a job may start, the newest one first."""
    found = [c for c in kube.items("Checkpoint", namespace) if is_true(c, "Restorable")]
    return sorted(found, key=lambda c: (c["status"]["round"], c["spec"]["step"]), reverse=True)


def newest_of(kube: Kube, namespace: str) -> str:
    found: list[Object] = wait_for(
        f"a Checkpoint of {namespace} that is Restorable",
        lambda: restorable(kube, namespace),
        describe=lambda: show(kube.items("Checkpoint", namespace)),
    )
    return str(found[0]["metadata"]["name"])


def assert_same_bits(scenario: Scenario, job: Job) -> None:
    job.wait_complete()
    problems = compare_digests(scenario.reference(SLOW), job.final_digests())
    assert not problems, "\n".join(problems)


@pytest.fixture
def tenant(scenario: Scenario, pool: str) -> Iterator[str]:
    """A second namespace, whose store has keys of its own and reads the same bucket."""
    with scenario.kube.new_namespace(f"{scenario.namespace}-tenant", pool=pool) as name:
        prepare_namespace(scenario.kube, name, pool=pool)
        yield name


def test_a_store_is_imported_after_every_object_was_lost(scenario):
    """To delete the job and its Checkpoints is the nearest thing to an etcd that is lost."""
    kube, namespace = scenario.kube, scenario.namespace
    lost = scenario.start(SLOW, name="lost")
    lost.wait_persisted(20)
    lost.delete()
    for item in kube.items("Checkpoint", namespace):
        kube.delete("Checkpoint", namespace, item["metadata"]["name"])
    wait_for(
        "all Checkpoints to be gone",
        lambda: not kube.items("Checkpoint", namespace),
        describe=lambda: show(kube.items("Checkpoint", namespace)),
    )
    shown = run_holdfast(namespace, "import", "store/main", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert kube.items("Checkpoint", namespace) == []
    ended = run_holdfast(namespace, "import", "store/main", "--job", "lost")
    assert ended.returncode == 0, ended.stderr
    name = newest_of(kube, namespace)
    assert name in ended.stdout
    again = run_holdfast(namespace, "import", "store/main", "--job", "lost")
    assert again.returncode == 0, again.stderr
    assert "import 0 checkpoints" in again.stdout
    job = scenario.start(SLOW, name="found", restore_from=name)
    assert_same_bits(scenario, job)
    assert name in {c["metadata"]["name"] for c in restorable(kube, namespace)}, (
        "retention leaves it"
    )


def test_a_job_starts_from_a_checkpoint_of_another_namespace_with_a_grant(scenario, tenant):
    kube = scenario.kube
    source = scenario.start(SLOW, name="source")
    source.wait_persisted(20)
    name = newest_of(kube, scenario.namespace)
    manifest = job_manifest("clone", tenant, SLOW)
    ref = {"name": name, "namespace": scenario.namespace}
    manifest["spec"]["restoreFrom"] = {"checkpointRef": ref}
    job = Job(kube, tenant, "clone").start(manifest)
    refused = job.wait_condition("Accepted", "False")
    assert refused["reason"] == "GrantMissing", show(refused)
    assert job.pods() == []
    grant = yaml.safe_load(refused["message"][refused["message"].index("apiVersion:") :])
    kube.create(grant)
    job.wait("its first round", lambda: "restorePoint" in job.status)
    point = job.status["restorePoint"]
    assert point["jobNamespace"] == scenario.namespace, show(point)
    assert condition(job.read(), "Accepted")["status"] == "True"
    assert_same_bits(scenario, job)
    job.delete()
    source.delete()
