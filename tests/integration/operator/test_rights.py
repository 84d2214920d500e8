"""The rights that the chart gives the operator, against the calls that it makes on a real API server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.chart import NAMESPACE
from tests.support.operator.api_proxy import ApiProxy, Refuse, streamed_lists
from tests.support.operator.operator_account import EVERYWHERE, Right
from tests.support.operator.operator_bed import DIGEST, OperatorBed, training, training_job
from tests.support.operator.served_sidecar import ServedSidecar

from holdfast_core.api import Checkpoint
from holdfast_core.contract import SIDECAR_CONTAINER
from holdfast_core.ids import JobUid, RestartRound, Step
from holdfast_core.messages.schema import RestorePoint
from holdfast_core.names import job_prefix
from holdfast_operator.model import labels

pytestmark = pytest.mark.integration

ADOPTION = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "CheckpointAdoption"}

CONTAINERS = [{"name": "trainer", "image": "example/trainer:1"}]


def until_called(bed: OperatorBed, since: int, right: Right) -> None:
    bed.until(f"a call that needs {right}", lambda: right in bed.account.calls(since).granted)


def keep_pod(bed: OperatorBed, name: str) -> None:
    """Add the finalizer that Kueue adds, so that the pod stays until the operator removes it."""
    path = f"/api/v1/namespaces/{bed.namespace}/pods/{name}"
    pod = bed.plane.request("GET", path)
    pod["metadata"]["finalizers"] = [labels.KUEUE_FINALIZER]
    bed.plane.request("PUT", path, pod)


def replace_pod(bed: OperatorBed, worker: int, round_: int, coordinator: str) -> ServedSidecar:
    """Delete the worker's pod of round 0, run the gang in the next round, and return the new sidecar."""
    bed.kubelet.delete_pod(bed.pod(worker, 0))
    bed.until(f"round {round_}", lambda: bed.status().get("restartRound") == round_)
    bed.until("new pod", lambda: bed.pod(worker, round_) in bed.pod_names())
    fresh = bed.kubelet.run_pod(bed.pod(worker, round_))
    bed.until("ROUND", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members))
    state = training(10 * round_, round_, 40 + round_)
    bed.kubelet.publish(coordinator, replace(state, last_local=None, last_replicated=None))
    bed.until("Running again", lambda: bed.condition("Running").get("status") == "True")
    return fresh


def forget_a_checkpoint(bed: OperatorBed) -> None:
    """Delete a Checkpoint whose job does not exist, so that the operator removes its finalizer."""
    stray = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": "stray", "finalizers": [Checkpoint.FINALIZER]},
        "spec": {"jobRef": {"name": "gone"}, "step": 10, "deletionPolicy": "DeleteData"},
    }
    bed.plane.request("POST", bed.path("checkpoints"), stray)
    bed.plane.request("DELETE", bed.path("checkpoints", "stray"))
    bed.until("it goes", lambda: bed.is_gone(bed.path("checkpoints", "stray")))


def adopt_a_pod(bed: OperatorBed, name: str, owner: dict[str, Any]) -> None:
    """Create a CheckpointAdoption, and a pod of this controller as the admission policy leaves it."""
    spec = {"workers": 1, "checkpoint": {"interval": {"steps": 10}}}
    body = {**ADOPTION, "metadata": {"name": name}, "spec": spec}
    meta = bed.plane.request("POST", bed.path("checkpointadoptions"), body)["metadata"]
    namespace = f"namespaces/{bed.namespace}"
    marks = {labels.ADOPT: name, labels.JOB_NAME: name}
    marks |= {labels.JOB_UID: meta["uid"], labels.WORKER: "0"}
    sidecar = {"name": SIDECAR_CONTAINER, "image": "example/sidecar:1"}
    pod = {
        "metadata": {
            "name": f"{name}-0",
            "labels": marks,
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"initContainers": [sidecar], "containers": CONTAINERS},
    }
    prefix = job_prefix(name, JobUid(meta["uid"]))
    secret = f"/api/v1/{namespace}/secrets/{prefix}-holdfast-certs-0"
    bed.until("certificates", lambda: not bed.is_gone(secret))
    bed.plane.request("POST", f"/api/v1/{namespace}/pods", pod)


def batch_job(bed: OperatorBed) -> dict[str, Any]:
    """Create a Job, and return a reference to it."""
    template = {"spec": {"restartPolicy": "Never", "containers": CONTAINERS}}
    job = {"metadata": {"name": "adopted"}, "spec": {"template": template}}
    path = f"/apis/batch/v1/namespaces/{bed.namespace}/jobs"
    made = bed.plane.request("POST", path, job)["metadata"]
    return {"apiVersion": "batch/v1", "kind": "Job", "name": "adopted", "uid": made["uid"]}


@pytest.mark.fault("The operator has the rights of `watchNamespaces` alone")
@pytest.mark.fault("The operator's token is stolen")
@pytest.mark.fault("The chart lacks a right that a call needs, or grants one that none needs")
def test_the_operator_needs_each_of_its_rights_and_no_other(
    empty_bed: OperatorBed, tmp_path: Path
) -> None:
    """A job with a store starts, loses its pods one after the other, saves, and ends.

    The operator restarts before the pods have started, so the next process finds what the first one created.
    The first process lists in pages, because the API server refuses streamed lists.
    """
    bed, begin = empty_bed, empty_bed.account.mark()
    lease = {
        "metadata": {"name": bed.kubelet.node},
        "spec": {"renewTime": "2026-01-01T00:00:00.000000Z"},
    }
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    bed.plane.request("POST", path, lease)
    other = f"{bed.namespace}-not-watched"
    bed.plane.create_namespace(other)
    unseen = bed.path("trainingjobs").replace(bed.namespace, other)
    bed.plane.request("POST", unseen, training_job())
    bed.forget_lease()
    with ApiProxy(bed.plane) as proxy:
        proxy.add(Refuse(422, "Invalid"), streamed_lists())
        bed.kubeconfig = tmp_path / "kubeconfig-of-the-proxy"
        proxy.write_kubeconfig(bed.account.kubeconfig, bed.kubeconfig)
        bed.start_operator()
        bed.add_store()
        bed.kill_operator()
    bed.kubeconfig = None
    bed.start_operator()
    job = training_job(object={"storeRef": {"name": "main"}, "every": {"steps": 10}})
    job["spec"] |= {"nodeLoss": {"suspectAfterSeconds": 15}, "ttlSecondsAfterFinished": 0}
    bed.create(job)
    bed.kill_operator()
    bed.start_operator()
    until_called(bed, begin, Right(bed.namespace, "services", "get"))  # it finds the Service
    bed.run_gang()
    kept = bed.store_at(0, 40)
    keep_pod(bed, bed.pod(1, 0))
    fresh = replace_pod(bed, 1, 1, coordinator=bed.pod(0, 0))
    fresh.manifests, fresh.documents, fresh.shards = kept.manifests, kept.documents, kept.shards
    replace_pod(bed, 0, 2, coordinator=bed.pod(1, 1))
    forget_a_checkpoint(bed)
    authority = f"/api/v1/namespaces/{NAMESPACE}/secrets/holdfast-ca-{bed.uid()}"
    saved = RestorePoint(Step(60), RestartRound(2), DIGEST)
    running = replace(training(30, 2, 60), last_persisted=saved)
    bed.kubelet.publish(bed.pod(1, 1), running)
    checkpoints = bed.path("checkpoints")
    bed.until("the record", lambda: bed.plane.request("GET", checkpoints)["items"])
    until_called(bed, begin, Right("kube-node-lease", "leases.coordination.k8s.io", "get"))
    bed.kubelet.publish(bed.pod(1, 1), replace(running, version=31, finished=True))
    bed.until("the job goes", lambda: bed.is_gone(bed.path("trainingjobs", "gpt")))
    bed.until("its authority goes", lambda: bed.is_gone(authority))

    assert "status" not in bed.plane.request("GET", f"{unseen}/gpt")

    adopt_a_pod(bed, "adopted", batch_job(bed))
    until_called(bed, begin, Right(bed.namespace, "jobs.batch", "get"))

    # The server asks for these when a pod with an owner is created. There is no call of their own.
    implied = {
        Right(bed.namespace, f"{kind}/finalizers.holdfast.dev", "update")
        for kind in ("trainingjobs", "checkpointadoptions", "checkpointstores")
    }
    given = bed.account.rights(bed.namespace)
    for right in sorted(given - implied):
        until_called(bed, begin, right)
    scopes = {r.scope for r in given}
    # The operator also looks for gangs in the namespaces of earlier tests, whose authorities are left.
    needed = {r for r in bed.account.calls(begin).granted if r.scope in scopes} | implied
    assert (sorted(needed - given), sorted(given - needed)) == ([], [])
    assert scopes == {EVERYWHERE, bed.namespace, NAMESPACE, "kube-node-lease"}
