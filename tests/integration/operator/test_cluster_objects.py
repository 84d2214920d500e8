"""Objects of the cluster that the operator handles, and objects that it must not change."""

from __future__ import annotations

import copy

import pytest
from tests.support.operator.operator_bed import (
    DIGEST,
    STORE,
    WORKERS,
    OperatorBed,
    training,
    training_job,
)
from tests.support.servers.control_plane import ControlPlaneError

from holdfast_core.api import Checkpoint
from holdfast_core.contract import StoreVerb

pytestmark = pytest.mark.integration


@pytest.mark.fault("A TrainingJob makes the operator create a privileged pod")
def test_a_template_that_the_server_refuses_is_reported(empty_bed: OperatorBed) -> None:
    empty_bed.start_operator()
    job = training_job()
    job["spec"]["template"]["spec"]["containers"][0]["image"] = ""
    empty_bed.plane.request("POST", empty_bed.path("trainingjobs"), job)
    empty_bed.until(
        "refused", lambda: empty_bed.condition("Accepted").get("reason") == "InvalidTemplate"
    )
    condition = empty_bed.condition("Accepted")
    assert condition["status"] == "False"
    assert "image" in condition["message"]

    privileged = training_job()
    privileged["metadata"]["name"] = "root"
    [trainer] = privileged["spec"]["template"]["spec"]["containers"]
    trainer["securityContext"] = {"privileged": True, "allowPrivilegeEscalation": True}
    enforce = "pod-security.kubernetes.io/enforce=restricted"
    empty_bed.plane.kubectl("label", "namespace", empty_bed.namespace, enforce)
    empty_bed.until("Pod Security is enforced", lambda: refuses_privileges(empty_bed))
    empty_bed.plane.request("POST", empty_bed.path("trainingjobs"), privileged)
    found = empty_bed.until("it is refused too", lambda: empty_bed.condition("Accepted", "root"))
    assert (found["status"], found["reason"]) == ("False", "InvalidTemplate")
    assert "privileged" in found["message"]
    assert empty_bed.pod_names() == []


def test_a_template_with_a_value_or_a_field_that_pods_do_not_have_is_reported(
    empty_bed: OperatorBed,
) -> None:
    empty_bed.start_operator()
    faults = {
        "quantity": ({"resources": {"limits": {"memory": "4GB"}}}, {}, "limits.memory: is '4GB'"),
        "map": ({"env": {"A": "b"}}, {}, "env: is an object, expected a list"),
        "port": ({"ports": "http"}, {}, "ports"),
        "typo": ({}, {"tolerationz": []}, 'unknown field "spec.tolerationz"'),
        "typo-in-a-container": ({"comand": ["x"]}, {}, 'unknown field "spec.containers[0].comand"'),
    }
    for name, (container, spec, _) in faults.items():
        job = training_job()
        job["metadata"]["name"] = name
        job["spec"]["template"]["spec"] |= spec
        job["spec"]["template"]["spec"]["containers"][0] |= container
        empty_bed.plane.request("POST", empty_bed.path("trainingjobs"), job)
    for name, (_, _, message) in faults.items():
        found = empty_bed.until(name, lambda name=name: empty_bed.condition("Accepted", name))
        assert (found["status"], found["reason"]) == ("False", "InvalidTemplate")
        assert message in found["message"]


def refuses_privileges(bed: OperatorBed) -> bool:
    """Return whether the API server refuses a privileged pod that an administrator creates."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "privileged"},
        "spec": {
            "containers": [{"name": "c", "image": "i", "securityContext": {"privileged": True}}]
        },
    }
    try:
        bed.plane.request("POST", f"/api/v1/namespaces/{bed.namespace}/pods?dryRun=All", pod)
    except ControlPlaneError as error:
        return "violates PodSecurity" in str(error)
    return False


def test_pods_are_created_once_the_service_account_exists(empty_bed: OperatorBed) -> None:
    """Namespace, store and job are created by one `kubectl apply`.

    Pods are refused until a controller of the cluster has created the service account.
    """
    account = f"/api/v1/namespaces/{empty_bed.namespace}/serviceaccounts"
    empty_bed.plane.request("DELETE", f"{account}/default")
    empty_bed.start_operator()
    empty_bed.plane.request("POST", empty_bed.path("checkpointstores"), STORE)
    empty_bed.plane.request("POST", empty_bed.path("trainingjobs"), training_job())
    empty_bed.until(
        "refused", lambda: "service account" in empty_bed.condition("Accepted").get("message", "")
    )

    def store_conditions() -> str:
        status = (
            empty_bed.plane.request("GET", empty_bed.path("checkpointstores", "main")).get("status")
            or {}
        )
        return str(status.get("conditions"))

    empty_bed.until("the store's probe is refused", lambda: "ProbeRefused" in store_conditions())
    empty_bed.plane.request("POST", account, {"metadata": {"name": "default"}})
    names = [empty_bed.pod(w, 0) for w in range(WORKERS)]
    empty_bed.until("the job's pods", lambda: names == empty_bed.pod_names())
    [budget] = empty_bed.plane.request(
        "GET", f"/apis/policy/v1/namespaces/{empty_bed.namespace}/poddisruptionbudgets"
    )["items"]
    assert budget["spec"]["minAvailable"] == WORKERS - 1
    empty_bed.until("a probe's pod", lambda: empty_bed.command_pod(StoreVerb.PROBE))


def add_tenant_with_store(bed: OperatorBed, namespace: str) -> None:
    """Create a namespace that the operator also watches, with a store that can be used."""
    bed.plane.create_namespace(namespace)
    bed.account.may_watch(namespace)
    bed.also_watched = (namespace,)
    stores = bed.path("checkpointstores").replace(bed.namespace, namespace)
    store = bed.plane.request("POST", stores, STORE)
    healthy = {
        "type": "Available",
        "status": "True",
        "reason": "Probed",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"conditions": [healthy], "observedGeneration": store["metadata"]["generation"]}
    bed.plane.request("PUT", f"{stores}/main/status", {**store, "status": status})


@pytest.mark.fault("A TrainingJob names the store or the Secret of another tenant")
def test_a_job_waits_until_its_store_is_probed(empty_bed: OperatorBed) -> None:
    """Another tenant has a healthy store of that name. It is not used, although the job asks for it."""
    tenant = f"{empty_bed.namespace}-other"
    add_tenant_with_store(empty_bed, tenant)
    empty_bed.start_operator()
    object_tier = {"storeRef": {"name": "main", "namespace": tenant}, "every": {"steps": 10}}
    empty_bed.plane.request(
        "POST", empty_bed.path("trainingjobs"), training_job(object=object_tier)
    )
    empty_bed.until(
        "no store", lambda: empty_bed.condition("Accepted").get("reason") == "StoreNotFound"
    )
    empty_bed.plane.request("POST", empty_bed.path("checkpointstores"), STORE)
    probe = empty_bed.until("a probe's pod", lambda: empty_bed.command_pod(StoreVerb.PROBE))
    assert probe["metadata"]["name"].startswith("holdfast-probe-main-")
    assert probe["spec"]["containers"][0]["command"] == ["holdfast-sidecar", "probe-store"]
    assert empty_bed.condition("Accepted")["status"] != "True"
    answer = (
        '{"available": true, "reason": "Probed", "message": "ok", "features": {"rangeGet": true}}'
    )
    empty_bed.kubelet.finish_pod(probe["metadata"]["name"], answer)
    empty_bed.until("accepted", lambda: empty_bed.condition("Accepted").get("status") == "True")
    found = empty_bed.plane.request("GET", empty_bed.path("checkpointstores", "main"))["status"]
    assert found["conditions"][0]["status"] == "True"
    assert found["features"] == {"rangeGet": True}
    names = [empty_bed.pod(w, 0) for w in range(WORKERS)]

    empty_bed.until("the job's pods", lambda: empty_bed.pod_names() == names)
    empty_bed.until("the probe is gone", lambda: empty_bed.command_pod(StoreVerb.PROBE) is None)


def test_a_requested_checkpoint_becomes_a_record(bed: OperatorBed) -> None:
    sidecar = bed.kubelet.sidecars[bed.pod(0, 0)]
    request = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": "now"},
        "spec": {"jobRef": {"name": "gpt"}},
    }
    bed.plane.request("POST", bed.path("checkpoints"), request)
    bed.until("save-now", lambda: "save-now" in [kind for kind, _ in sidecar.calls])
    bed.kubelet.publish(bed.pod(0, 0), training(3, 0, 43))
    path = bed.path("checkpoints", "now")
    bed.until(  # the operator may request the save before it writes the first status
        "the record",
        lambda: bed.plane.request("GET", path).get("status", {}).get("phase") == "Committed",
    )
    record = bed.plane.request("GET", path)
    assert record["spec"]["step"] == 43
    assert record["status"]["manifest"] == DIGEST
    assert record["status"]["worldSize"] == WORKERS


@pytest.mark.fault("A Checkpoint whose job is gone is deleted, on a real API server")
def test_a_deleted_checkpoint_whose_job_is_gone_does_not_hang(empty_bed: OperatorBed) -> None:
    """One checkpoint is deleted while no operator runs, the other one later."""
    for name in ("gpt-one", "gpt-two"):
        empty_bed.plane.request(
            "POST",
            empty_bed.path("checkpoints"),
            {
                "apiVersion": "holdfast.dev/v1alpha1",
                "kind": "Checkpoint",
                "metadata": {"name": name, "finalizers": [Checkpoint.FINALIZER]},
                "spec": {"jobRef": {"name": "gpt"}, "step": 10, "deletionPolicy": "DeleteData"},
            },
        )
    empty_bed.plane.request("DELETE", empty_bed.path("checkpoints", "gpt-one"))
    assert not empty_bed.is_gone(empty_bed.path("checkpoints", "gpt-one"))
    empty_bed.start_operator()
    empty_bed.until(
        "the first goes", lambda: empty_bed.is_gone(empty_bed.path("checkpoints", "gpt-one"))
    )
    assert not empty_bed.is_gone(empty_bed.path("checkpoints", "gpt-two"))
    empty_bed.plane.request("DELETE", empty_bed.path("checkpoints", "gpt-two"))
    empty_bed.until(
        "the second goes", lambda: empty_bed.is_gone(empty_bed.path("checkpoints", "gpt-two"))
    )


@pytest.mark.fault("A quota refuses pods on a real API server")
def test_a_quota_that_refuses_pods_reaches_status_and_events(empty_bed: OperatorBed) -> None:
    quota = f"/api/v1/namespaces/{empty_bed.namespace}/resourcequotas"
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": "0"}},
    }
    created = empty_bed.plane.request("POST", quota, body)
    # No controller manager runs that would fill in the status.
    created["status"] = {"hard": {"pods": "0"}, "used": {"pods": "0"}}
    empty_bed.plane.request("PUT", f"{quota}/pods/status", created)
    empty_bed.start_operator()
    empty_bed.plane.request("POST", empty_bed.path("trainingjobs"), training_job())
    refused = empty_bed.until(
        "the refusal",
        lambda: (
            "exceeded quota: pods" in (c := empty_bed.condition("Running")).get("message", "") and c
        ),
    )
    assert refused["reason"] == "CreateRefused"
    events = f"/api/v1/namespaces/{empty_bed.namespace}/events"
    empty_bed.until(  # the Event is created after the status
        "its Event",
        lambda: any(
            e["reason"] == "CreateRefused" for e in empty_bed.plane.request("GET", events)["items"]
        ),
    )
    empty_bed.plane.request("DELETE", f"{quota}/pods")
    names = [empty_bed.pod(w, 0) for w in range(WORKERS)]
    empty_bed.until("pods of round 0", lambda: empty_bed.pod_names() == names)


@pytest.mark.fault(
    "A job is created again on a real API server, and nothing of the old job is ever collected"
)
def test_a_job_is_created_again_while_the_objects_of_the_old_one_exist(bed: OperatorBed) -> None:
    """No garbage collector runs here, so pods, Secret and Service of the old job stay."""
    old, old_pods = bed.uid(), set(bed.pod_names())
    authority = f"/api/v1/namespaces/holdfast-system/secrets/holdfast-ca-{old}"
    bed.plane.request("DELETE", bed.path("trainingjobs", "gpt"))
    bed.plane.request("POST", bed.path("trainingjobs"), training_job())
    names = {bed.pod(w, 0) for w in range(WORKERS)}
    assert not names & old_pods
    bed.until("the new job's pods", lambda: names <= set(bed.pod_names()))
    for name in sorted(names):
        bed.kubelet.run_pod(name)
    fresh = bed.kubelet.sidecars[bed.pod(0, 0)]
    bed.until("ROUND", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members))
    bed.kubelet.publish(bed.pod(0, 0), training(2, 0, 40))
    bed.until("Running", lambda: bed.condition("Running").get("status") == "True")
    assert old_pods <= set(bed.pod_names()), "they are the garbage collector's"
    bed.until("the old authority goes", lambda: bed.is_gone(authority))
    assert not bed.is_gone(authority.replace(old, bed.uid()))


@pytest.mark.fault(
    "The CRDs are of a newer release, and a status has a phase that this operator does not know"
)
def test_a_job_that_cannot_be_read_is_not_changed(bed: OperatorBed) -> None:
    """The CRD of a newer release allows a phase that this operator does not know."""
    kind = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.holdfast.dev"
    authority = f"/api/v1/namespaces/holdfast-system/secrets/holdfast-ca-{bed.uid()}"
    before = bed.plane.request("GET", kind)["spec"]
    newer = copy.deepcopy(before)
    schema = newer["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["status"]["properties"]["phase"]["enum"].append("Hibernating")
    path = f"{bed.path('trainingjobs', 'gpt')}/status"
    bed.change(kind, lambda crd: crd.update(spec=newer))

    def set_phase(phase: str) -> bool:
        job = bed.plane.request("GET", bed.path("trainingjobs", "gpt"))
        try:
            bed.plane.request("PUT", path, {**job, "status": {**job["status"], "phase": phase}})
        except ControlPlaneError:
            return False  # a conflict, or the new schema is not in use yet
        return True

    try:
        bed.until("an unknown phase", lambda: set_phase("Hibernating"))
        bed.until("it is reported", lambda: bed.condition("Readable").get("status") == "False")
        assert "status.phase" in bed.condition("Readable")["message"]
        bed.kubelet.delete_pod(bed.pod(1, 0))
        bed.kill_operator()
        bed.start_operator()
        bed.until(
            "reported", lambda: "cannot be read, and the operator does not change it" in bed.log()
        )
        bed.until("in sync", lambda: "in sync" in bed.log())
        assert bed.status()["phase"] == "Hibernating"
        assert bed.status()["restartRound"] == 0
        assert not bed.is_gone(authority)
        bed.until("a phase that it knows", lambda: set_phase("Running"))
        bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
        bed.until("readable", lambda: bed.condition("Readable").get("status") == "True")
        bed.until("new pod", lambda: bed.pod(1, 1) in bed.pod_names())
        assert not bed.is_gone(authority)
    finally:
        bed.change(kind, lambda crd: crd.update(spec=before))
