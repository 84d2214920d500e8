"""A drill on a real API server: the request, the operator's pod, and what the Checkpoint says then."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.operator.operator_bed import DIGEST, OperatorBed

from holdfast_core.contract import DrillContract, StoreVerb
from holdfast_core.ids import JobUid

pytestmark = pytest.mark.integration

NAME = "gone-1a2b3c-s40-r0"
UID = JobUid("11111111-2222-3333-4444-555555555555")
STAMP = "2026-01-01T00:00:00Z"
DAMAGED = {
    "step": 40,
    "round": 0,
    "readBytes": 1 << 30,
    "seconds": 2.0,
    "shards": 2,
    "tensors": None,
    "notRestorable": "",
    "badCount": 1,
    "bad": [{"part": "shard of rank 1", "damage": "Cut", "message": "it ends at byte 7"}],
}


def create_checkpoint(bed: OperatorBed) -> None:
    """Create the Checkpoint of a job that is gone, which the store `main` has."""
    spec = {"jobRef": {"name": "gone"}, "step": 40, "verify": {"trigger": "first"}}
    body = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": NAME},
        "spec": spec,
    }
    made = bed.plane.request("POST", bed.path("checkpoints"), body)
    persisted = {
        "type": "Persisted",
        "status": "True",
        "reason": "Persisted",
        "message": "",
        "lastTransitionTime": STAMP,
    }
    status = {
        "phase": "Committed",
        "round": 0,
        "manifest": DIGEST,
        "jobUid": UID,
        "jobNamespace": bed.namespace,
        "store": "main",
        "worldSize": 2,
        "committedAt": STAMP,
        "conditions": [persisted],
    }
    path = f"{bed.path('checkpoints', NAME)}/status"
    bed.plane.request("PUT", path, {**made, "status": status})


def state(bed: OperatorBed) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """Return the status of the Checkpoint, and status and reason of its conditions."""
    status = bed.plane.request("GET", bed.path("checkpoints", NAME))["status"]
    return status, {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


@pytest.mark.fault("A drill finds damage in a checkpoint of a job that is gone")
def test_a_requested_drill_that_finds_damage_and_a_later_one_that_finds_none(
    empty_bed: OperatorBed,
) -> None:
    bed = empty_bed
    bed.start_operator()
    bed.add_store()
    create_checkpoint(bed)
    pod = bed.until("the drill's pod", lambda: bed.command_pod(StoreVerb.DRILL))
    environment = {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"]}
    contract = DrillContract.from_json(environment["HOLDFAST_DRILL"])
    assert contract == DrillContract(bed.namespace, UID, 40, 0, DIGEST)
    bed.kubelet.finish_pod(pod["metadata"]["name"], json.dumps(DAMAGED))
    bed.until("the damage", lambda: state(bed)[1].get("Verified") == ("False", "Damaged"))
    status, conditions = state(bed)
    assert conditions["Quarantined"] == ("True", "Damaged")
    assert (status["drill"]["trigger"], status["drill"]["gibPerSecond"]) == ("first", 0.5)
    bed.until("the pod goes", lambda: bed.command_pod(StoreVerb.DRILL) is None)
    shown = bed.plane.kubectl("get", "ckpt", NAME, "-n", bed.namespace)
    assert "VERIFIED" in shown and "False" in shown

    second = {"trigger": "second", "restore": True, "worldSize": 3}
    bed.change(bed.path("checkpoints", NAME), lambda raw: raw["spec"].update(verify=second))
    pod = bed.until("the second pod", lambda: bed.command_pod(StoreVerb.DRILL))
    environment = {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"]}
    assert DrillContract.from_json(environment["HOLDFAST_DRILL"]).world_size == 3
    intact = {**DAMAGED, "badCount": 0, "bad": [], "tensors": 4}
    bed.kubelet.finish_pod(pod["metadata"]["name"], json.dumps(intact))
    bed.until("no damage", lambda: state(bed)[1]["Verified"] == ("True", "Intact"))
    assert state(bed)[1]["Quarantined"] == ("False", "Released")
