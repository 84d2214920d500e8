"""What a thief of the operator's token may create and delete on a real API server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.api_objects import merged
from tests.support.operator.builders import job, metadata
from tests.support.operator.operator_account import USER
from tests.support.servers.control_plane import ControlPlane

from holdfast_core.api import TrainingJob
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.model.installation import SidecarSettings, WorkerNetwork
from holdfast_operator.model.render import (
    job_labels,
    owner_reference,
    render_network_policy,
    render_pod,
    render_service,
)

pytestmark = pytest.mark.integration


def worker(of: TrainingJob | None = None, **spec: Any) -> dict[str, Any]:
    """Return a worker's pod as the operator renders it, with these fields of its spec."""
    sidecar = SidecarSettings("example/sidecar:1")
    body = render_pod(of or job(2), Worker(0), RestartRound(0), None, sidecar)
    return {**body, "spec": merged(body["spec"], spec)}


def trainer(**fields: Any) -> dict[str, Any]:
    body = worker()
    [container] = body["spec"]["containers"]
    return {**body, "spec": {**body["spec"], "containers": [merged(container, fields)]}}


def owned(kind: str, **fields: Any) -> dict[str, Any]:
    of = job(2)
    metadata = {
        "name": "stolen",
        "namespace": "team-a",
        "labels": job_labels(of),
        "ownerReferences": [owner_reference(of)],
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **fields}


def avoiding() -> dict[str, Any]:
    """Return a worker that avoids two lost nodes, in each term of the template's node affinity."""
    of = job(2)
    terms = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-x"]}]},
        {},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = {**of.spec.template["spec"], "affinity": {"nodeAffinity": required}}
    of = job(2, template={"spec": spec})
    sidecar = SidecarSettings("example/sidecar:1")
    return render_pod(of, Worker(0), RestartRound(0), None, sidecar, ("node-a", "node-b"))


def without_owner(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], "ownerReferences": []}}


def of_another(body: dict[str, Any]) -> dict[str, Any]:
    owner = {
        **body["metadata"]["ownerReferences"][0],
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
    }
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}


def projected_token(**fields: Any) -> dict[str, Any]:
    token = {"path": "token", **fields}
    return {"name": "t", "projected": {"sources": [{"serviceAccountToken": token}]}}


SERVICE = render_service(job(2))
AUTHORITY = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "holdfast-ca-11111111", "namespace": "holdfast-system"},
}
TOKEN = "kubernetes.io/service-account-token"

DENIED: dict[str, tuple[dict[str, Any], str]] = {
    "a pod without an owner": (
        without_owner(worker()),
        "no TrainingJob, CheckpointAdoption or CheckpointStore",
    ),
    "a pod of a ReplicaSet": (
        of_another(worker()),
        "no TrainingJob, CheckpointAdoption or CheckpointStore",
    ),
    "a pod in kube-system": (
        worker(metadata(job(2), namespace="kube-system")),
        "a namespace of Kubernetes",
    ),
    "another service account": (
        worker(serviceAccountName="admin"),
        "runs as service account admin",
    ),
    "a mounted token": (worker(automountServiceAccountToken=True), "without a mounted token"),
    "a projected token": (
        worker(volumes=[*worker()["spec"]["volumes"], projected_token()]),
        "token of its service account in a volume",
    ),
    "a projected token for the API server by name": (
        worker(
            volumes=[
                *worker()["spec"]["volumes"],
                projected_token(audience="https://kubernetes.default.svc"),
            ]
        ),
        "token of its service account in a volume",
    ),
    "a privileged container": (
        trainer(securityContext={"privileged": True, "allowPrivilegeEscalation": True}),
        "has a privileged container",
    ),
    "a capability": (
        trainer(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        "capabilities other than",
    ),
    "a directory of the node": (
        worker(volumes=[*worker()["spec"]["volumes"], {"name": "h", "hostPath": {"path": "/"}}]),
        "mounts a hostPath",
    ),
    "processes of the node": (worker(hostPID=True), "a namespace or a port of the host"),
    "the network of the node": (worker(hostNetwork=True), "a namespace or a port of the host"),
    "a port of the node": (
        trainer(ports=[{"containerPort": 80, "hostPort": 80}]),
        "a namespace or a port of the host",
    ),
    "a Secret without an owner": (
        without_owner(owned("Secret")),
        "no TrainingJob, CheckpointAdoption or CheckpointStore",
    ),
    "a token of a service account": (
        merged(
            owned("Secret", type=TOKEN),
            {"metadata": {"annotations": {"kubernetes.io/service-account.name": "default"}}},
        ),
        "Secrets of type Opaque only",
    ),
    "another Secret of the operator's namespace": (
        {**AUTHORITY, "metadata": {"name": "other", "namespace": "holdfast-system"}},
        "no TrainingJob, CheckpointAdoption or CheckpointStore",
    ),
    "a Service that takes an external address": (
        {**SERVICE, "spec": {"ports": [{"port": 443}], "externalIPs": ["192.0.2.1"]}},
        "headless Services",
    ),
    "a network policy without an owner": (
        without_owner(render_network_policy(job(2), WorkerNetwork("holdfast-system", ()))),
        "no TrainingJob, CheckpointAdoption or CheckpointStore",
    ),
}

ALLOWED: dict[str, dict[str, Any]] = {
    "a worker": worker(),
    "a worker that avoids lost nodes": avoiding(),
    "certificates": owned("Secret"),
    "a headless Service": SERVICE,
    "a network policy": render_network_policy(job(2), WorkerNetwork("holdfast-system", ())),
    "an authority in its own namespace": AUTHORITY,
}


@pytest.fixture(scope="module", autouse=True)
def accounts(cluster: ControlPlane) -> None:
    """Create the service accounts. The server refuses a pod without one before it evaluates the policy."""
    for namespace, name in (("kube-system", "default"), ("team-a", "admin")):
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": name, "namespace": namespace},
            }
        )


def create(cluster: ControlPlane, body: dict[str, Any], user: str = USER) -> str:
    return cluster.kubectl(
        "create", "--dry-run=server", f"--as={user}", "-f", "-", stdin=json.dumps(body), check=False
    )


@pytest.mark.fault("An attacker with the operator's token creates other objects")
@pytest.mark.fault("A template mounts a token of an account in a projected volume")
@pytest.mark.fault("The operator's token is stolen")
@pytest.mark.fault("A TrainingJob makes the operator create a privileged pod")
@pytest.mark.parametrize("case", DENIED)
def test_the_operators_account_may_not_create(cluster: ControlPlane, case: str) -> None:
    body, expected = DENIED[case]
    text = create(cluster, body)
    assert "ValidatingAdmissionPolicy 'holdfast-operator'" in text and expected in text, text


@pytest.mark.fault("An operator's account creates a pod that avoids lost nodes")
@pytest.mark.parametrize("case", ALLOWED)
def test_the_operators_account_may_create(cluster: ControlPlane, case: str) -> None:
    text = create(cluster, ALLOWED[case])
    assert text.endswith("created (server dry run)\n"), text


def test_others_are_not_bound_by_the_policy(cluster: ControlPlane) -> None:
    body, _ = DENIED["a Secret without an owner"]
    text = cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(body))
    assert text.endswith("created (server dry run)\n")


@pytest.mark.fault("An attacker with the operator's token deletes other objects")
@pytest.mark.fault("The operator's token is stolen")
def test_the_operators_account_deletes_only_what_a_job_owns(cluster: ControlPlane) -> None:
    foreign = {**without_owner(owned("Secret")), "type": "Opaque"}
    cluster.apply(foreign)
    delete = ("delete", "secret", "stolen", "-n", "team-a", "--dry-run=server", f"--as={USER}")
    text = cluster.kubectl(*delete, check=False)
    assert "has no TrainingJob, CheckpointAdoption or CheckpointStore as its controller" in text, (
        text
    )


FINALIZER = "kueue.x-k8s.io/managed"
PATCHES: dict[str, tuple[dict[str, Any], bool]] = {
    "Kueue's finalizer is removed": (
        {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}},
        True,
    ),
    "the finalizer is removed and the group ends": (
        {
            "metadata": {
                "$deleteFromPrimitiveList/finalizers": [FINALIZER],
                "annotations": {"kueue.x-k8s.io/retriable-in-group": "false"},
            }
        },
        True,
    ),
    "another image": (
        {"spec": {"containers": [{"name": "trainer", "image": "example/mine:1"}]}},
        False,
    ),
    "a deadline": ({"spec": {"activeDeadlineSeconds": 60}}, False),
    "another label": ({"metadata": {"labels": {"app": "other"}}}, False),
    "a removed owner": ({"metadata": {"ownerReferences": None}}, False),
}


@pytest.fixture(scope="module")
def present_pod(cluster: ControlPlane) -> str:
    """Create a worker's pod with Kueue's finalizer, and return its name."""
    body = worker()
    body["metadata"] = {**body["metadata"], "name": "patched", "finalizers": [FINALIZER]}
    cluster.apply(body)
    return "patched"


@pytest.mark.parametrize("case", PATCHES)
def test_the_operators_account_changes_only_finalizers_and_annotations_of_a_pod(
    cluster: ControlPlane, present_pod: str, case: str
) -> None:
    patch, allowed = PATCHES[case]
    text = cluster.kubectl(
        *("patch", "pod", present_pod, "-n", "team-a", "--dry-run=server", f"--as={USER}"),
        *("-p", json.dumps(patch)),
        check=False,
    )
    refused = "ValidatingAdmissionPolicy 'holdfast-operator'" in text
    assert ("patched" in text and not refused) if allowed else refused, text
