"""Data in the object store that is deleted when its job has no gang any more, or is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.driver.jobs import Job
from testbed.driver.kube import condition, wait_for
from testbed.driver.oracle import stored_objects
from testbed.driver.scenario import SHORT
from testbed.driver.store import store_client

Steps = frozenset[int]


def _objects(job: Job) -> Steps:
    """Return the steps of which the job has Checkpoint objects."""
    found = job.kube.items("Checkpoint", job.namespace)
    return frozenset(c["spec"]["step"] for c in found if c["spec"]["jobRef"]["name"] == job.name)


def _stored(job: Job, uid: str) -> Steps:
    """Return the steps of which the store has a manifest."""
    keys = stored_objects(store_client(job.kube), job.namespace, uid)
    return frozenset(int(k.split("/")[1][1:]) for k in keys if k.startswith("manifests/"))


def _until(job: Job, what: str, probe: Callable[[], Any]) -> Any:
    return wait_for(what, probe, describe=lambda: str(_objects(job)))


def _complete(scenario: Any, policy: str) -> tuple[Job, str]:
    """Train a job to its end with at least two checkpoints in the store, none of which is pruned.

    Return it and its uid.
    """
    job = scenario.start(SHORT, keep_last=10, when_deleted=policy)
    job.wait_complete()
    uid = job.uid
    # The object of the last step may come after the end.
    _until(
        job, "the objects", lambda: SHORT.steps in (s := _objects(job)) and s == _stored(job, uid)
    )
    assert len(_objects(job)) >= 2
    return job, uid


def test_a_deleted_job_keeps_its_last_checkpoint_only(scenario):
    job, uid = _complete(scenario, "KeepLast")
    last = max(_objects(job))
    job.delete()
    _until(job, "one Checkpoint to be left", lambda: _objects(job) == {last})
    assert _stored(job, uid) == {last}
    found = job.kube.get("Checkpoint", job.namespace, _name_of(job, last))
    assert condition(found, "Restorable").get("status") == "True"


def test_a_deleted_job_takes_all_of_its_data_along(scenario):
    job, uid = _complete(scenario, "DeleteData")
    job.delete()
    _until(job, "no Checkpoint to be left", lambda: not _objects(job))
    assert stored_objects(store_client(job.kube), job.namespace, uid) == {}


def test_a_checkpoint_is_deleted_with_its_data_after_its_job_is_gone(scenario):
    job, uid = _complete(scenario, "Retain")
    first, last = min(_objects(job)), max(_objects(job))
    name = _name_of(job, first)
    job.kube.patch(
        "Checkpoint",
        job.namespace,
        name,
        {
            "spec": {"deletionPolicy": "DeleteData"},
            "metadata": {"finalizers": ["holdfast.dev/delete-data"]},
        },
    )
    job.delete()
    assert _stored(job, uid) >= {first, last}
    job.kube.delete("Checkpoint", job.namespace, name)
    _until(job, f"Checkpoint {name} to go", lambda: first not in _objects(job))
    assert first not in _stored(job, uid)
    assert last in _objects(job) and last in _stored(job, uid)


def _name_of(job: Job, step: int) -> str:
    found = job.kube.items("Checkpoint", job.namespace)
    return next(
        str(c["metadata"]["name"])
        for c in found
        if c["spec"]["step"] == step and c["spec"]["jobRef"]["name"] == job.name
    )
