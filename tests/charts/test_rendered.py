"""The rendered objects of the chart for each value, without a cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.chart import CHART, render_adoption

from holdfast_operator.base.settings import Settings
from holdfast_operator.model.installation import WorkerNetwork

pytestmark = pytest.mark.integration


Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[dict[str, Any]]]

SELECTOR = (("app.kubernetes.io/instance", "holdfast"), ("app.kubernetes.io/name", "holdfast"))

ALL_ON = (
    "metrics.serviceMonitor.enabled=true",
    "metrics.prometheusRule.enabled=true",
    "watchNamespaces={team-a,team-b}",
)
ALL_OFF = (
    "crds.install=false",
    "rbac.create=false",
    "rbac.aggregate=false",
    "serviceAccount.create=false",
    "admissionPolicy.enabled=false",
    "operatorPolicy.enabled=false",
    "networkPolicy.enabled=false",
)


def kinds(objects: list[dict[str, Any]]) -> list[str]:
    return sorted(f"{o['kind']}/{o['metadata']['name']}" for o in objects)


def one(objects: list[dict[str, Any]], kind: str, name: str = "holdfast") -> dict[str, Any]:
    [found] = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("values", [(), ALL_ON, ALL_OFF], ids=["defaults", "all on", "all off"])
def test_lint_finds_nothing(helm: Helm, values: tuple[str, ...]) -> None:
    helm("lint", "--strict", str(CHART), *(part for v in values for part in ("--set", v)))


def test_defaults_render_these_objects(render: Render) -> None:
    assert kinds(render()) == [
        "ClusterRole/holdfast",
        "ClusterRole/holdfast-admin",
        "ClusterRole/holdfast-edit",
        "ClusterRole/holdfast-view",
        "ClusterRoleBinding/holdfast",
        "CustomResourceDefinition/checkpointadoptions.holdfast.dev",
        "CustomResourceDefinition/checkpointgrants.holdfast.dev",
        "CustomResourceDefinition/checkpoints.holdfast.dev",
        "CustomResourceDefinition/checkpointstores.holdfast.dev",
        "CustomResourceDefinition/trainingjobs.holdfast.dev",
        "Deployment/holdfast",
        "NetworkPolicy/holdfast",
        "Role/holdfast",
        "Role/holdfast-node-leases",
        "RoleBinding/holdfast",
        "RoleBinding/holdfast-node-leases",
        "Service/holdfast-metrics",
        "ServiceAccount/holdfast",
        "ValidatingAdmissionPolicy/holdfast-operator",
        "ValidatingAdmissionPolicy/holdfast-trainingjobs",
        "ValidatingAdmissionPolicy/holdfast-trainingjobs-advice",
        "ValidatingAdmissionPolicy/holdfast-trainingjobs-deletion",
        "ValidatingAdmissionPolicyBinding/holdfast-operator",
        "ValidatingAdmissionPolicyBinding/holdfast-trainingjobs",
        "ValidatingAdmissionPolicyBinding/holdfast-trainingjobs-advice",
        "ValidatingAdmissionPolicyBinding/holdfast-trainingjobs-deletion",
    ]


def test_all_off_leaves_the_operator_alone(render: Render) -> None:
    assert kinds(render(*ALL_OFF)) == ["Deployment/holdfast", "Service/holdfast-metrics"]


def test_all_on_adds_monitoring_and_roles_of_the_watched_namespaces(render: Render) -> None:
    added = set(kinds(render(*ALL_ON))) - set(kinds(render()))
    assert added == {
        "PodMonitor/holdfast-sidecars",
        "PrometheusRule/holdfast",
        "Role/holdfast-jobs",
        "RoleBinding/holdfast-jobs",
        "ServiceMonitor/holdfast",
    }


def test_adoption_needs_a_cluster_that_serves_mutating_policies(helm: Helm, tmp_path: Path) -> None:
    arguments = ("template", "holdfast", str(CHART), "--set", "adoption.enabled=true")
    done = helm(*arguments, check=False)
    assert done.returncode != 0
    assert "serves no MutatingAdmissionPolicy" in done.stderr
    kinds = {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
    kinds |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert {o["kind"] for o in render_adoption(tmp_path)} == kinds


def test_the_training_runtime_needs_trainer_adoption_and_an_image(
    helm: Helm, tmp_path: Path
) -> None:
    def rendered(*values: str) -> str:
        sets = (part for value in values for part in ("--set", f"adoption.{value}"))
        served = ("--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")
        done = helm("template", "holdfast", str(CHART), *served, *sets, check=False)
        return done.stdout or done.stderr

    runtime, on = "trainingRuntime.enabled=true", "enabled=true"
    assert "kind: ClusterTrainingRuntime" not in rendered(on)
    assert "adoption.enabled is false" in rendered(runtime)
    assert "install Kubeflow Trainer first" in rendered(runtime, on)
    job = trained_by(render_adoption(tmp_path, "example/trainer:1"))
    assert job["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert job["spec"]["backoffLimit"] == 100
    assert job["spec"]["template"] == {
        "metadata": {"labels": {"holdfast.dev/adopt": ""}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [{"name": "node", "image": "example/trainer:1"}],
        },
    }


def trained_by(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the template of the Job whose pods train, of the ClusterTrainingRuntime among the objects."""
    (found,) = (o for o in objects if o["kind"] == "ClusterTrainingRuntime")
    (job,) = found["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    return dict(job["template"])


def test_the_pods_of_the_training_runtime_meet_the_rules_of_their_cluster(tmp_path: Path) -> None:
    """A TrainJob of Trainer 2.0 can set no security context, so the runtime has it."""
    objects = render_adoption(
        tmp_path,
        "example/trainer:1",
        "podSecurityContext.runAsNonRoot=true",
        "securityContext.capabilities.drop={ALL}",
        "tolerations[0].operator=Exists",
    )
    spec = trained_by(objects)["spec"]["template"]["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True}
    assert spec["containers"][0]["securityContext"] == {"capabilities": {"drop": ["ALL"]}}
    assert spec["tolerations"] == [{"operator": "Exists"}]


def test_watched_namespaces_are_the_only_ones_with_rights(render: Render) -> None:
    """By default the operator has its rights in all namespaces; here it has them only in two."""
    everywhere = one(render(), "ClusterRole")["rules"]
    objects = render("watchNamespaces={team-a,team-b}")
    left = one(objects, "ClusterRole")["rules"]
    assert [r["resources"] for r in left] == [["nodes"]]
    roles = [o for o in objects if o["kind"] == "Role" and o["metadata"]["name"] == "holdfast-jobs"]
    assert [r["metadata"]["namespace"] for r in roles] == ["team-a", "team-b"]
    assert all(left + role["rules"] == everywhere for role in roles)
    [container] = pod_of(objects)["containers"]
    assert {"name": "HOLDFAST_WATCH_NAMESPACES", "value": "team-a,team-b"} in container["env"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((), WorkerNetwork("holdfast-system", SELECTOR)),
        (("networkPolicy.workers=false",), None),
        (("networkPolicy.enabled=false",), None),
        (
            ("networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring",),
            WorkerNetwork(
                "holdfast-system",
                SELECTOR,
                ({"namespaceSelector": {"matchLabels": {"team": "monitoring"}}},),
            ),
        ),
    ],
    ids=["default", "switched off", "no policies at all", "metrics for one team"],
)
def test_the_operator_reads_the_network_policy_of_workers_from_the_chart(
    render: Render, values: tuple[str, ...], expected: WorkerNetwork | None
) -> None:
    [container] = pod_of(render(*values))["containers"]
    env = {e["name"]: e.get("value", "holdfast-system") for e in container["env"]}
    assert Settings.from_env(env).worker_network == expected


def test_environment_of_the_operator(render: Render) -> None:
    objects = render(
        "operator.image.tag=v2",
        "sidecar.image.repository=example/sidecar",
        "sidecar.image.tag=v3",
        "sidecar.image.pullPolicy=Never",
    )
    [container] = pod_of(objects)["containers"]
    assert container["image"] == "holdfast/operator:v2"
    assert {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]} == {
        "HOLDFAST_SIDECAR_IMAGE": "example/sidecar:v3",
        "HOLDFAST_SIDECAR_IMAGE_PULL_POLICY": "Never",
        "HOLDFAST_OPERATOR_NAMESPACE": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        "HOLDFAST_LEASE_NAME": "holdfast",
        "HOLDFAST_POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "HOLDFAST_METRICS_PORT": "8080",
        "HOLDFAST_HEALTH_PORT": "8081",
        "HOLDFAST_LOG_LEVEL": "info",
        "HOLDFAST_WORKERS": "32",
        "HOLDFAST_LEASE_SECONDS": "10",
        "HOLDFAST_WATCH_SILENCE_SECONDS": "75",
        "HOLDFAST_FAILING_NODE_CONDITIONS": "KernelDeadlock,ReadonlyFilesystem",
        "HOLDFAST_LEAVING_NODE_TAINTS": "aws-node-termination-handler/spot-itn,"
        "aws-node-termination-handler/scheduled-maintenance,"
        "aws-node-termination-handler/asg-lifecycle-termination,"
        "cloud.google.com/impending-node-termination,"
        "ToBeDeletedByClusterAutoscaler,karpenter.sh/disrupted",
        "HOLDFAST_WATCH_NAMESPACES": "",
        "HOLDFAST_WORKER_NETWORK_POLICY": json.dumps(
            {"metricsFrom": [], "operator": dict(SELECTOR)}, separators=(",", ":")
        ),
    }


def test_a_second_replica_is_on_another_node_and_only_one_may_be_evicted(render: Render) -> None:
    objects = render("operator.replicas=2")
    assert one(objects, "Deployment")["spec"]["replicas"] == 2
    [preferred] = pod_of(objects)["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    pods = one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert term["labelSelector"]["matchLabels"] == budget["selector"]["matchLabels"] == pods
    pinned = pod_of(render("operator.replicas=2", "operator.affinity.nodeAffinity.a=b"))
    assert set(pinned["affinity"]) == {"nodeAffinity"}, (
        "the affinity of the values replaces the default"
    )


def test_one_operator_is_replaced_without_a_gap_and_leaves_a_dead_node_soon(render: Render) -> None:
    deployment = one(render(), "Deployment")["spec"]
    assert deployment["replicas"] == 1
    assert "affinity" not in deployment["template"]["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert [
        (t["key"], t["effect"], t["tolerationSeconds"])
        for t in deployment["template"]["spec"]["tolerations"]
    ] == [
        ("node.kubernetes.io/not-ready", "NoExecute", 10),
        ("node.kubernetes.io/unreachable", "NoExecute", 10),
    ]


def test_operator_can_be_pinned(render: Render) -> None:
    pod = pod_of(
        render(
            "operator.nodeSelector.role=control",
            "operator.tolerations[0].key=role",
            "operator.tolerations[0].operator=Exists",
            "operator.priorityClassName=high",
            "imagePullSecrets[0].name=pull",
        )
    )
    assert pod["nodeSelector"] == {"role": "control"}
    assert pod["tolerations"][2] == {"key": "role", "operator": "Exists"}
    assert pod["priorityClassName"] == "high"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]


def test_selectors_fit_the_pods(render: Render) -> None:
    objects = render()
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    for selector in (
        one(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        one(objects, "Service", "holdfast-metrics")["spec"]["selector"],
        one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels


def test_pods_of_jobs_are_not_selected_as_the_operator(render: Render) -> None:
    """The operator watches pods with managed-by=holdfast, so its own pod must not have that label."""
    labels = one(render(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/managed-by"] == "Helm"


@pytest.mark.parametrize(
    ("keep", "expected"), [("true", {"helm.sh/resource-policy": "keep"}), ("false", None)]
)
def test_crds_are_kept_by_default(
    render: Render, keep: str, expected: dict[str, str] | None
) -> None:
    crds = [o for o in render(f"crds.keep={keep}") if o["kind"] == "CustomResourceDefinition"]
    assert [crd["metadata"].get("annotations") for crd in crds] == [expected] * 5


def test_names_follow_the_release_or_the_override(render: Render) -> None:
    names = {o["metadata"]["name"] for o in render("fullnameOverride=ckpt", *ALL_OFF)}
    assert names == {"ckpt", "ckpt-metrics"}


def test_an_existing_service_account_is_bound(render: Render) -> None:
    objects = render("serviceAccount.create=false", "serviceAccount.name=mine")
    assert pod_of(objects)["serviceAccountName"] == "mine"
    subjects = [o["subjects"] for o in objects if o["kind"].endswith("RoleBinding")]
    bound = {"kind": "ServiceAccount", "name": "mine", "namespace": "holdfast-system"}
    assert subjects == [[bound]] * len(subjects)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param("operator.imagee.tag=1", "imagee", id="misspelt"),
        pytest.param("operator.logLevel=loud", "logLevel", id="unknown level"),
        pytest.param("operator.workers=0", "workers", id="no workers"),
        pytest.param("operator.leaseSeconds=1", "leaseSeconds", id="a lease of a second"),
        pytest.param("crds.install=maybe", "install", id="no boolean"),
        pytest.param("sidecar.image.pullPolicy=Sometimes", "pullPolicy", id="pull policy"),
    ],
)
def test_wrong_values_are_refused(helm: Helm, value: str, text: str) -> None:
    done = helm("template", "holdfast", str(CHART), "--set", value, check=False)
    assert done.returncode != 0
    assert text in done.stderr


@pytest.mark.fault("The API server is frozen (probes of the operator)")
def test_liveness_and_readiness_ask_different_questions(render: Render) -> None:
    """A frozen API server makes the operator not ready. Restarting the operator would not help."""
    objects = render()
    (operator,) = (o for o in objects if o["kind"] == "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    (metrics,) = (o for o in objects if o["kind"] == "Service")
    assert metrics["spec"]["publishNotReadyAddresses"] is True
