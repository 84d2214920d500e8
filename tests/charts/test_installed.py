"""The chart on a real API server: rights, Pod Security, the admission policy, uninstall."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.api_objects import ABSENT, job_object, merged
from tests.support.chart import CHART
from tests.support.hang import HANG_SECONDS
from tests.support.operator.hostile_templates import HOSTILE_TEMPLATES
from tests.support.operator.operator_account import USER, rights
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane

pytestmark = pytest.mark.integration

GOLDEN = Path(__file__).with_name("golden") / "rights.txt"

Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[dict[str, Any]]]


def test_rights_of_the_operator_are_the_golden_ones(render: Render) -> None:
    verbs: dict[str, list[str]] = {}
    for right in rights(render()):
        verbs.setdefault(f"{right.scope}: {right.resource}", []).append(right.verb)
    lines = sorted(f"{what}: {' '.join(names)}\n" for what, names in verbs.items())
    assert "".join(lines) == GOLDEN.read_text()


@pytest.mark.fault("The operator's token is stolen")
@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "allowed"),
    [
        ("create", "secrets", "team-a", True),
        ("delete", "secrets", "team-a", True),
        ("get", "secrets", "team-a", False),
        ("list", "secrets", "team-a", False),
        ("update", "secrets", "team-a", False),
        ("get", "secrets", "holdfast-system", True),
        ("list", "secrets", "holdfast-system", True),
        ("watch", "secrets", "holdfast-system", False),
        ("create", "pods", "team-a", True),
        ("create", "networkpolicies.networking.k8s.io", "team-a", True),
        ("delete", "networkpolicies.networking.k8s.io", "team-a", False),
        ("create", "poddisruptionbudgets.policy", "team-a", True),
        ("patch", "poddisruptionbudgets.policy", "team-a", True),
        ("delete", "poddisruptionbudgets.policy", "team-a", False),
        ("patch", "pods", "team-a", True),
        ("update", "pods", "team-a", False),
        ("create", "pods/exec", "team-a", False),
        ("create", "pods/ephemeralcontainers", "team-a", False),
        ("get", "pods/log", "team-a", False),
        ("update", "trainingjobs.holdfast.dev", "team-a", False),
        ("update", "trainingjobs.holdfast.dev/status", "team-a", False),
        ("patch", "trainingjobs.holdfast.dev/status", "team-a", True),
        ("delete", "services", "team-a", False),
        ("get", "leases.coordination.k8s.io", "holdfast-system", True),
        ("delete", "leases.coordination.k8s.io", "holdfast-system", False),
        ("get", "leases.coordination.k8s.io", "team-a", False),
        ("update", "trainingjobs.holdfast.dev/finalizers", "team-a", True),
        ("create", "checkpoints.holdfast.dev", "team-a", True),
        ("delete", "checkpointstores.holdfast.dev", "team-a", False),
        ("watch", "checkpointgrants.holdfast.dev", "team-a", True),
        ("create", "checkpointgrants.holdfast.dev", "team-a", False),
        ("list", "leases.coordination.k8s.io", "kube-node-lease", True),
        ("list", "leases.coordination.k8s.io", "kube-system", False),
        ("escalate", "clusterroles.rbac.authorization.k8s.io", "team-a", False),
        ("impersonate", "users", "team-a", False),
        ("list", "customresourcedefinitions.apiextensions.k8s.io", "", False),
    ],
)
def test_the_server_grants_what_it_should(
    cluster: ControlPlane, verb: str, resource: str, namespace: str, allowed: bool
) -> None:
    kind, _, subresource = resource.partition("/")
    plural, _, group = kind.partition(".")
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": USER,
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": {
                "verb": verb,
                "group": group,
                "resource": plural,
                "subresource": subresource,
                "namespace": namespace,
            },
        },
    }
    answer = cluster.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    assert answer["status"]["allowed"] is allowed


def operator_pod(render: Render, **container: Any) -> str:
    [deployment] = [o for o in render() if o["kind"] == "Deployment"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "namespace": "holdfast-system"},
        "spec": deployment["spec"]["template"]["spec"],
    }
    pod["spec"]["containers"][0] = merged(pod["spec"]["containers"][0], container)
    return json.dumps(pod)


def test_the_operators_pod_is_restricted(cluster: ControlPlane, render: Render) -> None:
    cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=operator_pod(render))


def test_restricted_is_enforced_where_that_was_tested(
    cluster: ControlPlane, render: Render
) -> None:
    text = cluster.kubectl(
        "create",
        "--dry-run=server",
        "-f",
        "-",
        stdin=operator_pod(render, securityContext={"capabilities": ABSENT}),
        check=False,
    )
    assert 'violates PodSecurity "restricted' in text


def test_everything_is_valid_for_the_server(cluster: ControlPlane, render: Render) -> None:
    """The server validates all fields strictly. It has no schema for the kinds of monitoring.coreos.com."""
    known = [o for o in render() if not o["apiVersion"].startswith("monitoring.coreos.com")]
    text = cluster.kubectl(
        "apply",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": known}),
    )
    assert len(text.splitlines()) == len(known)


@pytest.fixture(scope="module")
def people(cluster: ControlPlane) -> ControlPlane:
    """Create two users: alice may edit in team-a; bob may only create TrainingJobs there."""

    def bind(user: str, kind: str, role: str) -> dict[str, Any]:
        return {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": user, "namespace": "team-a"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }

    only_jobs = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "only-jobs", "namespace": "team-a"},
        "rules": [
            {
                "apiGroups": ["holdfast.dev"],
                "resources": ["trainingjobs"],
                "verbs": ["get", "create", "update", "patch"],
            }
        ],
    }
    pods = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "jobs-and-pods", "namespace": "team-a"},
        "rules": [
            *only_jobs["rules"],
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]},
        ],
    }
    cluster.apply(
        only_jobs, pods, bind("bob", "Role", "only-jobs"), bind("alice", "Role", "jobs-and-pods")
    )
    for user in ("alice", "bob"):  # the server reads rights a moment after they were created
        asked = ("auth", "can-i", "create", "trainingjobs", "-n", "team-a", f"--as={user}")
        poll(f"the rights of {user}", lambda a=asked: cluster.kubectl(*a, check=False) == "yes\n")  # type: ignore[misc]
    return cluster


def create_as(cp: ControlPlane, user: str, job: dict[str, Any], verb: str = "create") -> str:
    return cp.kubectl(verb, f"--as={user}", "-f", "-", stdin=json.dumps(job), check=False)


def test_who_may_create_pods_may_create_a_job(people: ControlPlane) -> None:
    assert create_as(people, "alice", job_object("of-alice")).endswith("created\n")


@pytest.mark.fault("A TrainingJob makes the operator create a privileged pod")
def test_who_may_not_create_pods_may_not_create_a_job(people: ControlPlane) -> None:
    text = create_as(people, "bob", job_object("of-bob"))
    assert "bob may not create pods in namespace team-a, and a TrainingJob creates them" in text
    assert "ask for a role that may" in text


def test_a_template_may_not_be_changed_without_that_right_but_the_rest_may(
    people: ControlPlane,
) -> None:
    people.apply(job_object("shared"))
    resource = ("trainingjob", "shared", "-n", "team-a", "--as=bob", "--type=merge", "-p")
    assert "patched" in people.kubectl("patch", *resource, '{"spec": {"suspend": true}}')
    text = people.kubectl(
        "patch", *resource, '{"spec": {"template": {"spec": {"hostPID": true}}}}', check=False
    )
    assert "bob may not create pods" in text


@pytest.mark.fault("A template reaches for the sidecar's volumes, Secrets or processes")
@pytest.mark.fault("A template gives a Secret with certificates to a volume driver")
@pytest.mark.fault("Training code takes the store's keys, or reads objects of another job")
@pytest.mark.parametrize("case", HOSTILE_TEMPLATES)
def test_a_template_that_reaches_for_the_sidecar_is_refused(
    cluster: ControlPlane, case: str
) -> None:
    template, _ = HOSTILE_TEMPLATES[case]
    text = cluster.kubectl(
        "create",
        "--dry-run=server",
        "-f",
        "-",
        stdin=json.dumps(job_object("policy", template=template)),
        check=False,
    )
    assert "holdfast-trainingjobs" in text and "denied request: spec.template.spec" in text, text


def test_a_template_with_volumes_and_secrets_of_its_own_is_accepted(cluster: ControlPlane) -> None:
    trainer = {
        "name": "trainer",
        "image": "a:1",
        "volumeMounts": [
            {"name": "data", "mountPath": "/data/"},
            {"name": "keys", "mountPath": "/..keys"},
        ],
        "envFrom": [{"secretRef": {"name": "tracking"}}],
    }
    volumes = [
        {"name": "data", "emptyDir": {}},
        {"name": "keys", "projected": {"sources": [{"secret": {"name": "my-certs"}}]}},
    ]
    given = {"spec": {"containers": [trainer], "volumes": volumes}}
    cluster.kubectl(
        "create",
        "--dry-run=server",
        "-f",
        "-",
        stdin=json.dumps(job_object("policy", template=given)),
    )


TRAINER = {"name": "trainer", "image": "a:1"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(
            {
                "template": {
                    "spec": {
                        "containers": [
                            {**TRAINER, "livenessProbe": {"exec": {"command": ["true"]}}}
                        ]
                    }
                }
            },
            "container trainer has a livenessProbe",
            id="liveness probe",
        ),
        pytest.param(
            {
                "template": {
                    "spec": {
                        "containers": [
                            {**TRAINER, "lifecycle": {"preStop": {"sleep": {"seconds": 600}}}}
                        ]
                    }
                }
            },
            "container trainer has a preStop hook",
            id="preStop",
        ),
        pytest.param(
            {"template": {"spec": {"containers": [TRAINER], "nodeName": "gone"}}},
            "spec.template.spec.nodeName is gone",
            id="node name",
        ),
        pytest.param(
            {
                "template": {
                    "metadata": {"labels": {"holdfast.dev/job": "other"}},
                    "spec": {"containers": [TRAINER]},
                }
            },
            "spec.template.metadata.labels: holdfast.dev/job: the operator sets",
            id="our label",
        ),
        pytest.param(
            {"checkpoint": {"memory": {"sizeLimit": "1Mi"}}},
            "spec.checkpoint.memory.sizeLimit is 1Mi",
            id="small memory",
        ),
        pytest.param(
            {"checkpoint": {"node": {"volume": {"emptyDir": {"sizeLimit": "20M"}}}}},
            "spec.checkpoint.node.volume.emptyDir.sizeLimit is 20M",
            id="small node volume",
        ),
    ],
)
def test_a_value_that_is_nearly_always_a_mistake_is_accepted_with_a_warning(
    cluster: ControlPlane, spec: dict[str, Any], expected: str
) -> None:
    job = merged(job_object("advised"), {"spec": spec})
    text = cluster.kubectl(
        "create", "--dry-run=server", "-f", "-", stdin=json.dumps(job), check=False
    )
    assert "created (server dry run)" in text
    assert expected in text
    assert text.count("Warning:") == 1


def test_a_usual_job_causes_no_warning(cluster: ControlPlane) -> None:
    text = cluster.kubectl(
        "create",
        "--dry-run=server",
        "-f",
        "-",
        stdin=json.dumps(job_object("usual")),
        check=False,
    )
    assert "Warning" not in text


STORED = {"step": 60, "round": 0, "manifest": "b3:00"}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param({}, "", id="it has not begun"),
        pytest.param(
            {"lastCommittedStep": 60, "lastPersisted": STORED},
            "",
            id="the store has the newest step",
        ),
        pytest.param(
            {"lastCommittedStep": 90, "lastPersisted": STORED},
            "step 90 is only in the pods of deleted, and is deleted with them; step 60 stays in the",
            id="the store has an older step",
        ),
        pytest.param(
            {"lastCommittedStep": 90},
            "step 90 is only in the pods of deleted, and is deleted with them; no step is in an",
            id="no store has a step",
        ),
    ],
)
def test_the_deletion_of_a_job_warns_of_a_step_that_only_its_pods_have(
    cluster: ControlPlane, status: dict[str, Any], expected: str
) -> None:
    path = "/apis/holdfast.dev/v1alpha1/namespaces/team-a/trainingjobs"
    job = cluster.request("POST", path, job_object("deleted"))
    cluster.request("PUT", f"{path}/deleted/status", {**job, "status": status})
    text = cluster.kubectl("delete", "trainingjob", "deleted", "-n", "team-a", check=False)
    assert '"deleted" deleted' in text
    if not expected:
        assert "Warning" not in text
        return
    assert "Validation failed for ValidatingAdmissionPolicy" in text
    assert expected in text
    assert "spec.suspend: true" in text


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("holdfast-view", "rbac.authorization.k8s.io/aggregate-to-view"),
        ("holdfast-edit", "rbac.authorization.k8s.io/aggregate-to-edit"),
        ("holdfast-admin", "rbac.authorization.k8s.io/aggregate-to-admin"),
    ],
)
def test_roles_are_aggregated(cluster: ControlPlane, role: str, expected: str) -> None:
    labels = json.loads(cluster.kubectl("get", "clusterrole", role, "-o", "json"))["metadata"]
    assert labels["labels"][expected] == "true"


def test_columns_and_computed_summaries(cluster: ControlPlane) -> None:
    cluster.apply(job_object("columns"))
    status = {
        "phase": "Running",
        "step": 4210,
        "lastCommittedStep": 4200,
        "lastPersisted": {"step": 4000, "round": 3, "manifest": "b3:00"},
        "readyWorkers": "3/4",
        "restarts": 3,
        "goodput": {"ratio": 0.981},
        "restorePoint": {},
        "conditions": [
            {
                "type": "Running",
                "status": "True",
                "reason": "Training",
                "message": "all ranks train",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
    }
    path = "/apis/holdfast.dev/v1alpha1/namespaces/team-a/trainingjobs/columns"
    job = cluster.request("GET", path)
    stored = cluster.request("PUT", f"{path}/status", {**job, "status": status})
    assert stored["status"]["restorePoint"] == {}
    assert stored["spec"]["checkpoint"]["node"]["volume"]["emptyDir"]["sizeLimit"] == "20Gi"
    shown = cluster.kubectl("get", "tj", "columns", "-n", "team-a").splitlines()
    assert shown[0].split() == (
        [
            "NAME",
            "PHASE",
            "REASON",
            "STEP",
            "COMMITTED",
            "PERSISTED",
            "WORKERS",
            "RESTARTS",
            "GOODPUT",
            "AGE",
        ]
    )
    assert shown[1].split()[:-1] == [
        "columns",
        "Running",
        "Training",
        "4210",
        "4200",
        "4000",
        "3/4",
        "3",
        "0.981",
    ]


def test_columns_name_the_place_of_a_store_of_each_kind(cluster: ControlPlane) -> None:
    azure = {"account": "team", "container": "runs", "credentialsSecretRef": {"name": "keys"}}
    far = {**azure, "endpoint": "https://stack.local"}
    s3 = {
        "endpoint": "http://minio:9000",
        "bucket": "ckpt",
        "credentialsSecretRef": {"name": "keys"},
    }
    places = {
        "s3": {"s3": s3},
        "azure": {"azure": azure},
        "far": {"azure": far},
        "google": {"google": {"bucket": "team_runs"}},
    }
    for name, spec in places.items():
        kind = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "CheckpointStore"}
        path = "/apis/holdfast.dev/v1alpha1/namespaces/team-a/checkpointstores"
        body = {**kind, "metadata": {"name": f"columns-{name}"}, "spec": spec}
        cluster.request("POST", path, body)
    shown = cluster.kubectl("get", "ckptstore", "-n", "team-a").splitlines()
    found = [line.split()[:3] for line in shown if line.startswith(("NAME", "columns-"))]
    assert found == [
        ["NAME", "ENDPOINT", "BUCKET"],
        ["columns-azure", "team", "runs"],
        ["columns-far", "https://stack.local", "runs"],
        ["columns-google", "https://storage.googleapis.com", "team_runs"],
        ["columns-s3", "http://minio:9000", "ckpt"],
    ]


def test_explain_shows_descriptions(cluster: ControlPlane) -> None:
    text = cluster.kubectl("explain", "trainingjob.spec.checkpoint.peer.copies")
    assert "survives the loss of this number of nodes" in " ".join(text.split())


def test_uninstall_keeps_crds_and_jobs_and_nothing_else(helm: Helm) -> None:
    with ControlPlane() as cp:
        cp.create_namespace("holdfast-system")
        cp.create_namespace("team-a")
        at = ("-n", "holdfast-system", f"--kubeconfig={cp.kubeconfig}")
        helm("install", "holdfast", str(CHART), *at)
        helm("upgrade", "holdfast", str(CHART), *at)
        limit = f"--timeout={HANG_SECONDS:.0f}s"
        cp.kubectl("wait", "--for=condition=Established", limit, "crd", "trainingjobs.holdfast.dev")
        cp.apply(job_object())
        helm("uninstall", "holdfast", *at)
        left = cp.kubectl(
            "get",
            "crd,clusterrole,clusterrolebinding,validatingadmissionpolicy,"
            "validatingadmissionpolicybinding",
            "-l",
            "app.kubernetes.io/name=holdfast",
            "-o",
            "name",
        )
        assert sorted(line.rsplit("/", 1)[1] for line in left.splitlines()) == [
            "checkpointadoptions.holdfast.dev",
            "checkpointgrants.holdfast.dev",
            "checkpoints.holdfast.dev",
            "checkpointstores.holdfast.dev",
            "trainingjobs.holdfast.dev",
        ]
        assert "gpt-small" in cp.kubectl("get", "tj", "-n", "team-a")
