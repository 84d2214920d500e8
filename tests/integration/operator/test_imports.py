"""Checkpoints of another cluster and of another namespace: their objects, their grants, and jobs from them.

The pod that lists the store is played by the kubelet of the tests, which writes no logs.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.support.operator.builders import manifest_digest
from tests.support.operator.operator_bed import OperatorBed, training_job

from holdfast_cli.importing import plan_import
from holdfast_core.contract import ListContract, StoreVerb
from holdfast_core.names import LIST_ANNOTATION

pytestmark = pytest.mark.integration

LINE = {
    "namespace": "team-of-the-past",
    "jobUid": "0f5c8a3e-0000-4000-8000-000000000001",
    "step": 4200,
    "round": 3,
    "job": "gpt",
    "manifest": manifest_digest(4200, 3),
    "bytes": 6_700_000,
    "worldSize": 2,
    "committedAt": "2026-11-01T00:00:00Z",
}


def imported(bed: OperatorBed, namespace: str = "") -> dict[str, Any]:
    """Create the object of LINE as the command does, and return it when the operator has recorded it."""
    (body,) = plan_import([LINE], [], "main").objects
    there = bed.path("checkpoints").replace(bed.namespace, namespace or bed.namespace)
    bed.plane.request("POST", there, body)
    path = f"{there}/{body['metadata']['name']}"
    bed.until("the record", lambda: "status" in bed.plane.request("GET", path))
    found: dict[str, Any] = bed.plane.request("GET", path)
    return found


@pytest.mark.fault("Etcd is lost with every job and Checkpoint, and the store is imported")
def test_a_job_starts_from_a_checkpoint_of_another_cluster(empty_bed: OperatorBed) -> None:
    empty_bed.start_operator()
    empty_bed.add_store()
    found = imported(empty_bed)
    status = found["status"]
    assert (status["phase"], status["round"], status["bytes"]) == ("Committed", 3, 6_700_000)
    assert (status["jobUid"], status["jobNamespace"]) == (LINE["jobUid"], LINE["namespace"])
    assert status["store"] == "main", "a drill and a deletion find the data there"
    true = {c["type"]: c["reason"] for c in status["conditions"] if c["status"] == "True"}
    assert true["Restorable"] == "Imported"
    assert true["Persisted"] == "Persisted"
    job = training_job(object={"storeRef": {"name": "main"}, "every": {"steps": 10}})
    job["spec"]["restoreFrom"] = {"checkpointRef": {"name": found["metadata"]["name"]}}
    empty_bed.create(job)
    for worker in (0, 1):
        empty_bed.kubelet.run_pod(empty_bed.pod(worker, 0))
    empty_bed.until("a restore point", lambda: "restorePoint" in empty_bed.status())
    assert empty_bed.status()["restorePoint"] == {
        "step": 4200,
        "round": 3,
        "jobUid": LINE["jobUid"],
        "jobNamespace": LINE["namespace"],
    }


def test_a_person_asks_for_a_list_and_takes_the_request_back(empty_bed: OperatorBed) -> None:
    empty_bed.start_operator()
    empty_bed.add_store()
    wanted = ListContract("team-of-the-past", None, "1").to_json()

    def annotate(text: str) -> None:
        store = ("checkpointstore", "main", "-n", empty_bed.namespace)
        empty_bed.plane.kubectl("annotate", *store, text)

    annotate(f"{LIST_ANNOTATION}={wanted}")
    pod = empty_bed.until("the pod", lambda: empty_bed.command_pod(StoreVerb.LIST))
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["holdfast-sidecar", "list-store"]
    assert {"name": "HOLDFAST_LIST", "value": wanted} in container["env"]
    annotate(f"{LIST_ANNOTATION}-")
    empty_bed.until("the pod goes", lambda: empty_bed.command_pod(StoreVerb.LIST) is None)


@pytest.mark.fault("A grant is taken back while a clone restores")
def test_a_clone_of_another_namespace_follows_its_grant(empty_bed: OperatorBed) -> None:
    owner = f"{empty_bed.namespace}-owner"
    empty_bed.plane.create_namespace(owner)
    empty_bed.account.may_watch(owner)
    empty_bed.also_watched = (owner,)
    empty_bed.start_operator()
    empty_bed.add_store()
    name = imported(empty_bed, owner)["metadata"]["name"]
    job = training_job(object={"storeRef": {"name": "main"}, "every": {"steps": 10}})
    job["spec"]["restoreFrom"] = {"checkpointRef": {"name": name, "namespace": owner}}
    empty_bed.plane.request("POST", empty_bed.path("trainingjobs"), job)
    wanted = "GrantMissing"
    accepted = empty_bed.until(
        "the missing grant",
        lambda: (c := empty_bed.condition("Accepted")).get("reason") == wanted and c,
    )
    grant = yaml.safe_load(accepted["message"][accepted["message"].index("apiVersion:") :])
    grants = empty_bed.path("checkpointgrants").replace(empty_bed.namespace, owner)
    empty_bed.plane.request("POST", grants, grant)
    pods = [empty_bed.pod(worker, 0) for worker in (0, 1)]
    empty_bed.until("the pods", lambda: empty_bed.pod_names() == pods)
    for pod in pods:
        empty_bed.kubelet.run_pod(pod)
    empty_bed.until("a restore point", lambda: "restorePoint" in empty_bed.status())
    assert empty_bed.status()["restorePoint"]["jobNamespace"] == LINE["namespace"]

    empty_bed.plane.request("DELETE", f"{grants}/{grant['metadata']['name']}")
    empty_bed.until("the wait", lambda: empty_bed.condition("Running").get("reason") == wanted)
    status = empty_bed.status()
    assert (status["restartRound"], "restorePoint" in status) == (1, False)
    assert empty_bed.pod_names() == pods, "the pods stay"
    empty_bed.plane.request("POST", grants, grant)
    empty_bed.until("the restore again", lambda: "restorePoint" in empty_bed.status())
