"""The pod of a worker: what is added to the template, and what stays unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.operator.builders import UID, job, store

from holdfast_core.api import CheckpointStatus, EphemeralVolumeSpec, TrainingJob, changed
from holdfast_core.api.checkpoint_policy import NodeTierSpec, NodeVolumeSpec
from holdfast_core.contract import CERTS_VOLUME, PodContract, SidecarContract
from holdfast_core.ids import FIRST_SPARE, RestartRound, Step, Worker
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings, WorkerNetwork
from holdfast_operator.model.job import StoreView
from holdfast_operator.model.render import (
    render_checkpoint,
    render_disruption_budget,
    render_network_policy,
    render_pod,
    render_service,
)

SIDECAR = SidecarSettings("example/sidecar:1", "Always")


def render(of: TrainingJob, with_store: StoreView | None = None) -> dict[str, Any]:
    return render_pod(of, Worker(1), RestartRound(3), with_store, SIDECAR)


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    spec = pod["spec"]
    found = [c for c in [*spec["initContainers"], *spec["containers"]] if c["name"] == name]
    assert len(found) == 1
    return dict(found[0])


def annotations_of(pod: dict[str, Any]) -> dict[str, str]:
    """Return the annotations without the record of the spec, which test_views.py reads."""
    return {k: v for k, v in pod["metadata"]["annotations"].items() if k != labels.RENDERED_FROM}


def plain_env(of: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in of["env"] if "value" in e}


def with_spec(changes: dict[str, Any], trainer: dict[str, Any] | None = None) -> TrainingJob:
    base = job(2)
    template: dict[str, Any] = {"spec": {**base.spec.template["spec"], **changes}}
    if trainer is not None:
        old = template["spec"]["containers"][0]
        template["spec"]["containers"] = [{**old, **trainer}]
    return changed(base, spec=changed(base.spec, template=template))


def test_a_spare_differs_from_a_worker_in_its_index_only() -> None:
    """Its Secret has the certificates of the spares."""
    spare = render_pod(job(2), FIRST_SPARE, RestartRound(3), None, SIDECAR)
    worker = render(job(2))
    name, secret = "job-l2msg4-s0-r3", "job-l2msg4-certs-64-r3"
    assert spare["metadata"]["name"] == name
    [volume] = [v for v in spare["spec"]["volumes"] if v["name"] == CERTS_VOLUME]
    assert volume["secret"]["secretName"] == secret
    assert plain_env(container(spare, "trainer"))["HOLDFAST_WORKER"] == str(FIRST_SPARE)
    text = (
        json.dumps(spare).replace(name, "job-l2msg4-1-r3").replace(secret, "job-l2msg4-certs-0-r3")
    )
    assert json.loads(text.replace(f'"{FIRST_SPARE}"', '"1"')) == worker


def test_identity_and_owner() -> None:
    pod = render(job(2))
    meta, spec = pod["metadata"], pod["spec"]
    assert meta["name"] == "job-l2msg4-1-r3"
    assert meta["labels"] == {
        labels.MANAGED_BY: "holdfast",
        labels.JOB_NAME: "job",
        labels.JOB_UID: UID,
        labels.COMPONENT: "worker",
        labels.WORKER: "1",
        labels.BIRTH_ROUND: "3",
    }
    (owner,) = meta["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("TrainingJob", UID)
    assert owner["controller"] is True
    assert owner["blockOwnerDeletion"] is True
    assert (spec["hostname"], spec["subdomain"]) == ("job-l2msg4-1-r3", "job-l2msg4-gang")
    assert spec["restartPolicy"] == "OnFailure"
    assert spec["automountServiceAccountToken"] is False
    assert "tolerations" not in spec


def test_the_contracts_can_be_read_back() -> None:
    pod = render(job(2), store())
    trainer = PodContract.from_env(plain_env(container(pod, "trainer")))
    assert (trainer.worker, trainer.birth_round, trainer.job_uid) == (1, 3, UID)
    env = container(pod, "holdfast-sidecar")["env"]
    (address,) = [e for e in env if e["name"] == "HOLDFAST_POD_IP"]
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    values = plain_env(container(pod, "holdfast-sidecar"))
    sidecar = SidecarContract.from_env({**values, "HOLDFAST_POD_IP": "10.0.0.1"})
    assert (sidecar.pod_name, sidecar.node_capacity_bytes) == ("job-l2msg4-1-r3", 20 << 30)
    assert sidecar.store_config() == store().config


def test_the_sidecar_is_native_probed_and_flushed() -> None:
    sidecar = container(render(job(2)), "holdfast-sidecar")
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["image"] == "example/sidecar:1"
    assert sidecar["imagePullPolicy"] == "Always"
    started, ready = sidecar["startupProbe"], sidecar["readinessProbe"]
    assert started["exec"]["command"] == ["holdfast-sidecar", "healthz", "--timeout", "60"]
    assert ready["httpGet"] == {"path": "/readyz?wait=280", "port": 7072}
    assert (started["timeoutSeconds"], ready["timeoutSeconds"]) == (65, 285)
    assert "exec" in sidecar["lifecycle"]["preStop"]
    assert sidecar["resources"]["limits"]["memory"]


@pytest.mark.fault("Training code takes the store's keys, or reads objects of another job")
def test_keys_and_certificates_are_mounted_in_the_sidecar_only() -> None:
    pod = render(job(2), store(ca_secret="store-ca"))
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    mounts = {
        c["name"]: {m["name"] for m in c.get("volumeMounts", [])}
        for c in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    }
    assert mounts["trainer"] == {"holdfast-shared"}
    assert mounts["holdfast-sidecar"] == set(volumes)
    secret = volumes["holdfast-certs"]["secret"]
    assert secret["secretName"] == "job-l2msg4-certs-0-r3"
    assert {i["key"]: i["path"] for i in secret["items"]} == {
        "ca.crt": "ca.crt",
        "job-l2msg4-1-r3.crt": "tls.crt",
        "job-l2msg4-1-r3.key": "tls.key",
    }
    sources = volumes["holdfast-store"]["projected"]["sources"]
    assert [s["secret"]["name"] for s in sources] == ["store-keys", "store-ca"]


def test_a_job_without_a_store_mounts_no_store_keys() -> None:
    assert "holdfast-store" not in {v["name"] for v in render(job(2))["spec"]["volumes"]}


@pytest.mark.parametrize(
    ("shared", "trainer", "expected"),
    [
        pytest.param(None, {"resources": {"limits": {"memory": "4Gi"}}}, str(4 << 30), id="limit"),
        pytest.param("1Gi", {}, str(1 << 30), id="set in the spec"),
        pytest.param(None, {"resources": {}}, None, id="none"),
    ],
)
def test_shared_memory(shared: str | None, trainer: dict[str, Any], expected: str | None) -> None:
    of = with_spec({}, trainer)
    of = job(2, template=of.spec.template, size_limit=shared)
    volumes = {v["name"]: v for v in render(of)["spec"]["volumes"]}
    empty_dir = volumes["holdfast-shared"]["emptyDir"]
    assert empty_dir["medium"] == "Memory"
    assert empty_dir.get("sizeLimit") == expected
    assert volumes["holdfast-node"]["emptyDir"] == {"sizeLimit": str(20 << 30)}


def test_a_node_volume_of_a_storage_class() -> None:
    of = job(2)
    claimed = EphemeralVolumeSpec(storage_class_name="nvme", size="1Gi")
    node = NodeTierSpec(volume=NodeVolumeSpec(ephemeral=(claimed,)))
    spec = changed(of.spec, checkpoint=changed(of.spec.checkpoint, node=node))
    pod = render(changed(of, spec=spec))
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    assert volumes["holdfast-node"]["ephemeral"]["volumeClaimTemplate"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "nvme",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    sidecar = container(pod, "holdfast-sidecar")
    mounts = {m["name"]: m["mountPath"] for m in sidecar["volumeMounts"]}
    contract = SidecarContract.from_env(
        {**{e["name"]: e.get("value", "") for e in sidecar["env"]}, "HOLDFAST_POD_IP": ""}
    )
    assert contract.node_dir == mounts["holdfast-node"]
    assert contract.node_capacity_bytes == 1 << 30


def test_restricted_where_the_template_is_silent() -> None:
    pod = render(job(2))
    assert pod["spec"]["securityContext"] == {
        "fsGroup": 65532,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for name in ("trainer", "holdfast-sidecar"):
        context = container(pod, name)["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_values_of_the_template_take_precedence() -> None:
    of = with_spec(
        {"securityContext": {"runAsUser": 0, "fsGroup": 7}, "nodeSelector": {"gpu": "yes"}},
        {"securityContext": {"readOnlyRootFilesystem": True}},
    )
    pod = render(of)
    assert pod["spec"]["securityContext"]["fsGroup"] == 7
    assert "runAsNonRoot" not in pod["spec"]["securityContext"]
    assert pod["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert container(pod, "trainer")["securityContext"] == {"readOnlyRootFilesystem": True}


@pytest.mark.fault("A TrainingJob makes the operator create a privileged pod")
def test_the_operator_adds_no_privilege() -> None:
    text = repr(render(job(2), store()))
    for word in ("privileged", "hostPath", "hostNetwork", "hostPID", "'add'", "hostIPC"):
        assert word not in text


def test_users_environment_stays_and_ours_wins() -> None:
    of = with_spec(
        {}, {"env": [{"name": "LR", "value": "1"}, {"name": "HOLDFAST_WORKER", "value": "9"}]}
    )
    env = container(render(of), "trainer")["env"]
    assert [e["value"] for e in env if e["name"] == "HOLDFAST_WORKER"] == ["1"]
    assert [e["value"] for e in env if e["name"] == "LR"] == ["1"]


def test_other_nodes_are_preferred_and_users_affinity_stays() -> None:
    mine = {"nodeAffinity": {"x": 1}, "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]
    }}  # fmt: skip
    affinity = render(with_spec({"affinity": mine}))["spec"]["affinity"]
    assert affinity["nodeAffinity"] == {"x": 1}
    terms = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0] == {"weight": 1}
    assert terms[1]["podAffinityTerm"]["labelSelector"]["matchLabels"] == {labels.JOB_UID: UID}


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
LOST = [
    {"key": "metadata.name", "operator": "NotIn", "values": ["node-a"]},
    {"key": "metadata.name", "operator": "NotIn", "values": ["node-b"]},
]
ZONE = {"key": "zone", "operator": "In", "values": ["z"]}
OWN = {"key": "metadata.name", "operator": "NotIn", "values": ["node-x"]}


@pytest.mark.fault("The template's own node affinity has several terms, or empty ones")
@pytest.mark.parametrize(
    ("name", "terms", "expected"),
    [
        ("no affinity", None, [{"matchFields": LOST}]),
        (
            "terms are alternatives, so each excludes the nodes",
            [{"matchExpressions": [ZONE]}, {"matchFields": [OWN]}],
            [
                {"matchExpressions": [ZONE], "matchFields": LOST},
                {"matchFields": [OWN, *LOST]},
            ],
        ),
        (
            "a term without requirements matches no node",
            [{}, {"matchExpressions": [], "matchFields": None}, {"matchExpressions": [ZONE]}],
            [
                {},
                {"matchExpressions": [], "matchFields": None},
                {"matchExpressions": [ZONE], "matchFields": LOST},
            ],
        ),
    ],
)
def test_lost_nodes_are_excluded_from_every_term(
    name: str, terms: list[dict[str, Any]] | None, expected: list[dict[str, Any]]
) -> None:
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
    own = preferred if terms is None else {**preferred, REQUIRED: {"nodeSelectorTerms": terms}}
    of = with_spec({"affinity": {"nodeAffinity": own}})
    before = repr(of.spec.template)
    pod = render_pod(of, Worker(1), RestartRound(3), None, SIDECAR, ("node-a", "node-b"))
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert affinity == {**preferred, REQUIRED: {"nodeSelectorTerms": expected}}, name
    assert annotations_of(pod) == {labels.AVOIDED_NODES: "node-a,node-b"}
    assert repr(of.spec.template) == before


def test_nodes_on_which_workers_failed_are_excluded_and_recorded_apart_from_lost_ones() -> None:
    """A new operator process takes those in the first annotation for lost until their leases change."""
    pod = render_pod(job(2), Worker(1), RestartRound(3), None, SIDECAR, ("node-b",), ("node-a",))
    [term] = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term == {"matchFields": LOST}
    assert annotations_of(pod) == {
        labels.AVOIDED_NODES: "node-b",
        labels.FAILED_NODES: "node-a",
    }


def test_a_template_cannot_forge_the_nodes_that_the_operator_avoided() -> None:
    of = job(2)
    annotations = {
        "annotations": {
            labels.AVOIDED_NODES: "node-a",
            labels.FAILED_NODES: "node-b",
            "team": "x",
        }
    }
    template = {**of.spec.template, "metadata": annotations}
    pod = render(job(2, template=template))
    assert annotations_of(pod) == {"team": "x"}
    assert "nodeAffinity" not in pod["spec"]["affinity"]


def test_the_template_is_not_changed_and_rendering_is_deterministic() -> None:
    of = job(2)
    before = repr(of.spec.template)
    assert render(of) == render(of)
    assert repr(of.spec.template) == before


def test_service_is_headless_and_names_pods_before_they_are_ready() -> None:
    service = render_service(job(2))
    assert service["metadata"]["name"] == "job-l2msg4-gang"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {labels.JOB_UID: UID}


def test_checkpoint_objects_outlive_their_job() -> None:
    body = render_checkpoint(job(2), "job-l2msg4-s40-r2", Step(40), CheckpointStatus())
    assert "ownerReferences" not in body["metadata"]
    assert body["spec"] == {"jobRef": {"name": "job"}, "step": 40, "deletionPolicy": "Retain"}


@pytest.mark.parametrize(("workers", "remain"), [(1, 0), (2, 1), (4096, 4095)])
def test_one_worker_at_a_time_may_be_evicted(workers: int, remain: int) -> None:
    budget = render_disruption_budget(job(workers), workers)
    assert budget["spec"]["minAvailable"] == remain
    assert budget["spec"]["selector"] == {"matchLabels": {labels.JOB_UID: UID}}


@pytest.mark.fault("A pod of another job or tenant calls a worker")
@pytest.mark.fault("A pod of another tenant connects to a sidecar")
def test_workers_are_reached_by_each_other_the_operator_and_readers_of_metrics() -> None:
    reader = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    network = WorkerNetwork("holdfast-system", (("app", "holdfast"),), (reader,))
    policy = render_network_policy(job(2), network)
    workers = {"podSelector": {"matchLabels": {labels.JOB_UID: UID}}}
    assert policy["spec"]["podSelector"] == workers["podSelector"]
    assert policy["spec"]["ingress"] == [
        {"from": [workers]},
        {
            "from": [
                {
                    "namespaceSelector": {
                        "matchLabels": {"kubernetes.io/metadata.name": "holdfast-system"}
                    },
                    "podSelector": {"matchLabels": {"app": "holdfast"}},
                }
            ],
            "ports": [{"port": 7070, "protocol": "TCP"}],
        },
        {"ports": [{"port": 7072, "protocol": "TCP"}], "from": [reader]},
    ]
    (owner,) = policy["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("TrainingJob", UID, True)
