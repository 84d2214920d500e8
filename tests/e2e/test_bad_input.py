"""Mistakes of users, and the messages that they get: field or object, value found, remedy.

Training is as short as possible. Every condition and Event comes from the running operator. The tests also
show that correcting the mistake is sufficient, and that good jobs of the same namespace complete. What the
API server refuses is in tests/charts, on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from testbed.config import SHARED
from testbed.driver.jobs import (
    MINIO_PASSWORD,
    MINIO_USER,
    Job,
    Training,
    job_manifest,
    prepare_namespace,
    store_manifest,
)
from testbed.driver.kube import Kube, Object, condition, is_true, show, wait_for
from testbed.driver.oracle import compare_digests

ALONE = Training(workers=1, steps=20, sleep_per_step=0.0, layers=1, width=32)
BALLAST = Training(workers=1, steps=20, sleep_per_step=0.0, layers=1, width=32, state_mib=16)
ONE_WORKER: dict[str, Any] = {"copies": 0, "object_every": None}


@pytest.fixture(scope="module")
def namespace(installed: Kube, worker_id: str) -> Iterator[str]:
    """One namespace for all cases of a test process, whose objects have different names."""
    with installed.new_namespace(f"e2e-bad-input-{worker_id}", pool=SHARED) as name:
        prepare_namespace(installed, name, pool=SHARED)
        yield name


@pytest.fixture
def submit(installed: Kube, namespace: str) -> Iterator[Callable[[Object], Job]]:
    """Create a job from a manifest, and delete it after the test."""
    jobs: list[Job] = []

    def create(manifest: Object) -> Job:
        job = Job(installed, namespace, manifest["metadata"]["name"])
        jobs.append(job)
        installed.create(manifest)
        return job

    yield create
    for job in jobs:
        job.delete()


def trainer(manifest: Object) -> Object:
    container: Object = manifest["spec"]["template"]["spec"]["containers"][0]
    return container


def without_restarts(manifest: Object) -> Object:
    manifest["spec"]["failurePolicy"] = {"maxRestarts": 0, "window": "1h"}
    return manifest


def assert_contains(text: str, *texts: str) -> None:
    missing = [w for w in texts if w not in text]
    assert not missing, f"{missing} missing in:\n{text}"


def wait_event(kube: Kube, namespace: str, name: str, reason: str, *texts: str) -> None:
    """Wait for an Event of that reason about our object `name` that contains all `texts`."""

    def probe() -> list[str]:
        return [
            e["message"]
            for e in kube.events(namespace)
            if e["involvedObject"]["name"] == name
            and e["reason"] == reason
            and all(w in e["message"] for w in texts)
        ]

    wait_for(
        f"Event {reason} of {name} that contains {texts}",
        probe,
        describe=lambda: show(
            [
                (e["involvedObject"]["name"], e["reason"], e["message"])
                for e in kube.events(namespace)
            ]
        ),
    )


# --------------------------------------------------------------------------- stores


def test_a_job_waits_for_its_store_and_for_the_keys_of_the_store(installed, namespace, submit):
    """tests/integration/object_store/test_object_probe.py tries stores with other mistakes."""
    manifest = job_manifest("store-late", namespace, ALONE, copies=0)
    manifest["spec"]["checkpoint"]["object"]["storeRef"]["name"] = "late"
    job = submit(manifest)
    texts = ("CheckpointStore late", f"namespace {namespace}", "create it, or correct storeRef")
    _wait_not_accepted(job, "StoreNotFound", *texts)

    installed.create(store_manifest(namespace, "late", credentialsSecretRef={"name": "late-keys"}))
    found = _wait_store(installed, namespace, "late", "False")
    texts = ("Secret late-keys", "accessKey and secretKey", "create what is missing")
    assert found["reason"] == "SecretNotFound", show(found)
    assert_contains(found["message"], *texts)
    wait_event(installed, namespace, "late", "SecretNotFound", *texts)
    _wait_not_accepted(job, "StoreUnavailable", "CheckpointStore late", *texts)
    assert job.pods() == [], "no pod waits for a store that does not work"

    keys = {"accessKey": MINIO_USER, "secretKey": MINIO_PASSWORD}
    installed.ensure_secret(namespace, "late-keys", keys)
    _wait_store(installed, namespace, "late", "True")
    job.wait_condition("Accepted")
    job.wait_complete()


def _wait_store(kube: Kube, namespace: str, name: str, status: str) -> Object:
    def probe() -> Object | None:
        found = condition(kube.get("CheckpointStore", namespace, name), "Available")
        return found if found.get("status") == status else None

    return wait_for(
        f"CheckpointStore {name} Available={status}",
        probe,
        describe=lambda: show(kube.get("CheckpointStore", namespace, name)),
    )


def _wait_not_accepted(job: Job, reason: str, *texts: str) -> None:
    def probe() -> Object | None:
        found = condition(job.read(), "Accepted")
        says = found.get("reason") == reason and all(w in found["message"] for w in texts)
        return found if says else None

    found = job.wait(f"Accepted=False because of {reason} that contains {texts}", probe)
    assert found["status"] == "False"
    wait_event(job.kube, job.namespace, job.name, reason, *texts)


# --------------------------------------------------------------------------- restoreFrom


def test_a_job_that_restores_from_an_absent_checkpoint_is_refused(installed, namespace, submit):
    manifest = job_manifest("from-nowhere", namespace, ALONE, copies=0, restore_from="gone-s20-r0")
    job = submit(manifest)
    texts = ("spec.restoreFrom", "Checkpoint gone-s20-r0", f"not in namespace {namespace}")
    _wait_not_accepted(job, "CheckpointNotFound", *texts)
    assert job.pods() == [], "it never starts from the beginning instead"


def test_jobs_start_from_a_retained_checkpoint_unless_its_shapes_differ(
    installed, namespace, submit, reference
):
    """Three jobs start from the newest Checkpoint of a deleted job with one rank, side by side."""
    first = submit(job_manifest("one-rank", namespace, ALONE, copies=0))
    first.wait_complete()

    def last() -> list[str]:
        """Return the Checkpoint of the last step, whose object may come after the end of the job."""
        items = installed.items("Checkpoint", namespace)
        found = [c for c in items if c["spec"]["jobRef"]["name"] == first.name]
        newest = [c for c in found if c["spec"]["step"] == ALONE.steps and is_true(c, "Persisted")]
        return [c["metadata"]["name"] for c in newest]

    (name,) = first.wait("the Checkpoint of the last step", last)
    first.delete()

    wider = Training(workers=1, steps=20, layers=1, width=48)
    manifest = job_manifest("other-shapes", namespace, wider, copies=0, restore_from=name)
    misfit = submit(without_restarts(manifest))
    longer = replace(ALONE, steps=40)
    again = submit(job_manifest("again", namespace, longer, copies=0, restore_from=name))
    two = replace(ALONE, workers=2, steps=40)
    pair = submit(job_manifest("two-ranks", namespace, two, restore_from=name))

    found = misfit.wait_condition("Failed")
    texts = ("StateMismatchError", "model.", "expected float32 [", "48]", "found float32 [", "32]")
    assert_contains(found["message"], *texts)
    wait_event(installed, namespace, misfit.name, found["reason"], *texts)
    assert is_true(installed.get("Checkpoint", namespace, name), "Persisted"), "nothing was lost"

    again.wait_complete()
    assert again.status["restorePoint"]["step"] == 20, "it starts from the retained Checkpoint"
    assert compare_digests(reference(longer), again.final_digests()) == []
    pair.wait_complete()
    assert pair.status["restorePoint"]["step"] == 20, "it is not bad input: two ranks take over"


# --------------------------------------------------------------------------- pods that do not start


def test_an_image_that_cannot_be_pulled_is_reported(installed, namespace, submit):
    image = "registry.invalid/nobody/nothing:1"
    manifest = job_manifest("no-image", namespace, ALONE, **ONE_WORKER)
    trainer(manifest)["image"] = image
    job = submit(manifest)
    _assert_cannot_start(job, image)

    installed.patch("TrainingJob", namespace, job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    job.wait("no pods", lambda: not job.pods())


def test_an_image_without_the_launcher_is_reported(installed, namespace, submit):
    """The kubelet retries. The job waits, reports the message, and does not use up restarts."""
    manifest = job_manifest("no-launcher", namespace, ALONE, **ONE_WORKER)
    trainer(manifest)["image"] = "holdfast/operator:dev"
    job = submit(manifest)
    _assert_cannot_start(job, "holdfast", "not found")
    job.wait("two more tries of the kubelet", lambda: _tries(job) >= 2 or job.round > 0)
    _assert_cannot_start(job, "holdfast", "not found")
    assert job.status["members"] == [0], "another pod of the same image would do no better"


def _tries(job: Job) -> int:
    """Return the restart count of the trainer's container in the kubelet's status."""
    return sum(
        c["restartCount"]
        for pod in job.pods()
        for c in pod["status"].get("containerStatuses", [])
        if c["name"] == "trainer"
    )


def _assert_cannot_start(job: Job, *texts: str) -> None:
    def probe() -> Object | None:
        found = condition(job.read(), "Running")
        cannot_start = found.get("reason") == "ContainerCannotStart"
        return found if cannot_start and all(w in found["message"] for w in texts) else None

    found = job.wait(f"ContainerCannotStart that contains {texts}", probe)
    assert found["status"] == "False"
    assert_contains(found["message"], f"pod {job.pod_name(0)}")
    wait_event(job.kube, job.namespace, job.name, "ContainerCannotStart", *texts)
    assert all(r["ignored"] for r in job.status["recentRestarts"]), "waiting costs no restart"


# --------------------------------------------------------------------------- too little room


def test_too_little_shared_memory_is_reported_before_the_first_step(installed, namespace, submit):
    manifest = job_manifest("small-memory", namespace, BALLAST, **ONE_WORKER)
    manifest["spec"]["checkpoint"]["memory"] = {"sizeLimit": "1Mi"}
    job = submit(without_restarts(manifest))
    found = job.wait_condition("Failed")
    texts = ("CapacityError", "shared memory volume", "needs", "has", "spec.checkpoint.memory")
    assert_contains(found["message"], "rank 0 ended with code 1", *texts)
    wait_event(installed, namespace, job.name, found["reason"], *texts)
    assert not job.status.get("step"), "not one step was trained for nothing"


@pytest.mark.fault("The node volume has no room for one save")
def test_a_node_volume_without_room_for_one_save_is_reported_before_the_first_step(
    installed, namespace, submit
):
    manifest = job_manifest("smallest-volume", namespace, BALLAST, **ONE_WORKER, node_size="8Mi")
    job = submit(without_restarts(manifest))
    found = job.wait_condition("Failed")
    texts = ("CapacityError", "node volume has", "needs", "spec.checkpoint.node.volume")
    assert_contains(found["message"], "rank 0 ended with code 1", *texts)
    wait_event(installed, namespace, job.name, found["reason"], *texts)
    assert not job.status.get("step"), "not one step was trained for nothing"


def test_a_node_volume_without_room_for_a_second_save_does_not_stop_training(
    installed, namespace, submit
):
    # Of 30 MiB, 25 may be used. One save has 16.
    manifest = job_manifest("small-volume", namespace, BALLAST, **ONE_WORKER, node_size="30Mi")
    job = submit(manifest)
    job.wait_complete()
    found = job.wait_condition("LastCheckpointSucceeded", "False")
    assert found["reason"] == "NodeVolumeFull"
    assert all(r["ignored"] for r in job.status["recentRestarts"]), "no rank and no pod died of it"
    assert job.status["lastCommittedStep"] == 10, "the checkpoint that has room is kept"
    texts = ("needs", "bytes", "available", "checkpoint.node.volume")
    assert_contains(found["message"], *texts)
    wait_event(installed, namespace, job.name, "NodeVolumeFull", *texts)


# --------------------------------------------------------------------------- state


UNSAVABLE = """
import holdfast

with holdfast.Checkpointer() as ckpt:
    for step in ckpt.steps(20, {"seen": {"documents": {1, 2, 3}}}):
        pass
"""


def test_a_state_that_cannot_be_saved_is_reported_with_its_path(installed, namespace, submit):
    installed.core.create_namespaced_config_map(
        namespace, {"metadata": {"name": "script"}, "data": {"unsavable.py": UNSAVABLE}}
    )
    manifest = job_manifest("unsavable", namespace, ALONE, **ONE_WORKER)
    container = trainer(manifest)
    container["command"] = ["holdfast", "run", "--", "python3", "/script/unsavable.py"]
    container["volumeMounts"] = [{"name": "script", "mountPath": "/script", "readOnly": True}]
    volume = {"name": "script", "configMap": {"name": "script"}}
    manifest["spec"]["template"]["spec"]["volumes"] = [volume]
    job = submit(without_restarts(manifest))
    found = job.wait_condition("Failed")
    texts = ("UnsupportedStateError", "seen.documents", "set cannot be saved", "expected tensors")
    assert_contains(found["message"], *texts)
    wait_event(installed, namespace, job.name, found["reason"], *texts)
