"""Data of a job that is gone is deleted by a pod that the operator may create, and the objects go."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.operator_bed import (
    DIGEST,
    WORKERS,
    OperatorBed,
    training,
    training_job,
)

from holdfast_core.contract import DeleteContract, StoreVerb
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import RestorePoint

pytestmark = pytest.mark.integration
SAVED = CheckpointId(Step(40), RestartRound(0))


def checkpoints(bed: OperatorBed) -> list[Any]:
    found: list[Any] = bed.plane.request("GET", bed.path("checkpoints"))["items"]
    return found


def train_with_a_checkpoint(bed: OperatorBed, policy: str) -> dict[str, Any]:
    """Train a job that has stored step 40, and return the Checkpoint that records it."""
    bed.start_operator()
    bed.add_store()
    tier = {"storeRef": {"name": "main"}, "every": {"steps": 10}}
    bed.train(training_job(object=tier, retention={"whenDeleted": policy}))
    point = RestorePoint(SAVED.step, SAVED.round, DIGEST)
    state = replace(training(99, 0, 41), last_persisted=point, last_replicated=point)
    bed.kubelet.publish(bed.pod(0, 0), state)

    def recorded() -> Any:
        found = [c for c in checkpoints(bed) if (c.get("status") or {}).get("phase")]
        return found[0] if found else None

    return dict(bed.until("the Checkpoint", recorded))


def delete_job(bed: OperatorBed) -> None:
    pods = [bed.pod(worker, 0) for worker in range(WORKERS)]
    bed.plane.request("DELETE", bed.path("trainingjobs", "gpt"))
    for pod in pods:  # there is no garbage collector here
        bed.kubelet.delete_pod(pod)


def answer(bed: OperatorBed) -> DeleteContract:
    """Play the pod that deletes: return what it was asked to delete, and let it succeed."""
    pod = bed.until("the pod that deletes", lambda: bed.command_pod(StoreVerb.DELETE))
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["holdfast-sidecar", "delete"]
    request = next(e["value"] for e in container["env"] if e["name"] == "HOLDFAST_DELETE")
    bed.kubelet.finish_pod(pod["metadata"]["name"], json.dumps({"deleted": 1}))
    return DeleteContract.from_json(request)


def test_a_deleted_job_takes_its_data_along(empty_bed: OperatorBed) -> None:
    bed = empty_bed
    found = train_with_a_checkpoint(bed, "DeleteData")
    assert found["status"]["whenDeleted"] == "DeleteData"
    assert found["status"]["store"] == "main"
    uid = bed.uid()
    delete_job(bed)
    wanted = answer(bed)
    assert (wanted.job_uid, wanted.keep, wanted.ended) == (uid, (), True)
    bed.until("no Checkpoint", lambda: not checkpoints(bed))
    bed.until("no pod", lambda: bed.command_pod(StoreVerb.DELETE) is None)


def test_a_checkpoint_that_outlives_its_job_takes_its_data_along(empty_bed: OperatorBed) -> None:
    bed = empty_bed
    name = train_with_a_checkpoint(bed, "Retain")["metadata"]["name"]
    path = bed.path("checkpoints", name)
    bed.change(path, lambda raw: raw["spec"].update(deletionPolicy="DeleteData"))
    bed.until(
        "the finalizer",
        lambda: bed.plane.request("GET", path)["metadata"].get("finalizers"),
    )
    delete_job(bed)
    bed.plane.request("DELETE", path)
    wanted = answer(bed)
    assert wanted.checkpoints == (SAVED,)
    bed.until("no Checkpoint", lambda: not checkpoints(bed))


@pytest.mark.fault("A request to save names a job that does not exist")
def test_a_request_for_a_job_that_does_not_exist_fails(empty_bed: OperatorBed) -> None:
    """It may fail after a minute only, because the job may be created a moment later."""
    bed = empty_bed
    bed.start_operator()
    request = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": "now"},
        "spec": {"jobRef": {"name": "nothing"}},
    }
    bed.plane.request("POST", bed.path("checkpoints"), request)

    def status() -> dict[str, Any]:
        return dict(bed.plane.request("GET", bed.path("checkpoints", "now")).get("status") or {})

    bed.until("the request fails", lambda: status().get("phase") == "Failed")
    why = next(c for c in status()["conditions"] if c["type"] == "Committed")
    assert (why["status"], why["reason"]) == ("False", "JobNotFound")
