"""Builders of the objects of a job, as plain dicts: the same input gives the same bytes. Pure.

The pod of a worker is the user's template with the additions that Holdfast requires. These are the native
sidecar container, its shared memory with the trainer, its node volume, its certificates, the store's keys,
and the environment of the pod contract. The operator overwrites restartPolicy, hostname, subdomain,
automountServiceAccountToken and the variables of the contract. In the security context the template's fields
take precedence, and the restricted Pod Security profile fills in the others. The operator adds no privilege
to the trainer.

The placeholder of a missing worker and the additions to pods of another controller are made of the same
parts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from holdfast_core.api import (
    API_VERSION,
    Checkpoint,
    CheckpointAdoption,
    CheckpointStatus,
    CheckpointStore,
    DeletionPolicy,
    Gang,
    InjectionStatus,
    Variable,
    merge_patch,
    parse_quantity_bytes,
)
from holdfast_core.contract import (
    CERTS_DIR,
    CERTS_VOLUME,
    CONTROL_PORT,
    METRICS_PORT,
    NODE_DIR,
    NODE_VOLUME,
    PREFIX,
    SHARED_DIR,
    SIDECAR_CONTAINER,
    STORE_DIR,
    TRAINER_CONTAINER,
    WEB_TOKEN_FILE,
    PodContract,
    SidecarContract,
    WorkerContract,
)
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.names import (
    CERTIFICATES_IN_SECRET,
    certificates_secret_name,
    placeholder_name,
    pod_name,
    service_name,
)
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings, WorkerNetwork
from holdfast_operator.model.job import PodGroup, StoreView
from holdfast_operator.model.ownership import certificates_prefix
from holdfast_operator.model.template import grace_of, part_digests, to_annotation


def certificate_items(pod: str) -> tuple[tuple[str, str], ...]:
    """Return pairs (key in the Secret, file name in contract.CERTS_DIR) that this pod mounts.

    They are the CA's certificate, and the certificate and key of the pod's leaf.
    """
    return (("ca.crt", "ca.crt"), (f"{pod}.crt", "tls.crt"), (f"{pod}.key", "tls.key"))


def job_labels(job: Gang) -> dict[str, str]:
    return {
        labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
        labels.JOB_NAME: job.name,
        labels.JOB_UID: job.uid,
    }


def worker_labels(job: Gang, worker: Worker, birth_round: RestartRound) -> dict[str, str]:
    return {
        **job_labels(job),
        labels.COMPONENT: labels.COMPONENT_WORKER,
        labels.WORKER: str(worker),
        labels.BIRTH_ROUND: str(birth_round),
    }


def group_labels(group: PodGroup | None) -> dict[str, str]:
    """Return the labels by which Kueue holds a pod back until it admits the whole group."""
    if group is None:
        return {}
    queue_labels = {labels.QUEUE_NAME: group.queue, labels.POD_GROUP: group.name}
    if group.priority_class is not None:
        queue_labels[labels.QUEUE_PRIORITY] = group.priority_class
    return queue_labels


def group_annotations(group: PodGroup | None) -> dict[str, str]:
    """Return the annotations that Kueue requires of each pod of a group."""
    if group is None:
        return {}
    return {labels.POD_GROUP_COUNT: str(group.pods), labels.ROLE_HASH: labels.ROLE_WORKER}


def owner_reference(owner: Gang | Checkpoint | CheckpointStore) -> dict[str, Any]:
    """Return the controller reference by which an object is deleted with its owner."""
    return {
        "apiVersion": API_VERSION,
        "kind": owner.KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _metadata(job: Gang, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": job_labels(job),
        "ownerReferences": [owner_reference(job)],
    }


def render_service(job: Gang) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": labels.SERVICE,
        "metadata": _metadata(job, service_name(job.name, job.uid)),
        "spec": {
            "clusterIP": "None",
            # Ranks rendezvous before their pods are ready.
            "publishNotReadyAddresses": True,
            "selector": {labels.JOB_UID: job.uid},
            "ports": [{"name": "control", "port": CONTROL_PORT, "protocol": "TCP"}],
        },
    }


def render_network_policy(job: Gang, network: WorkerNetwork) -> dict[str, Any]:
    workers = {"matchLabels": {labels.JOB_UID: job.uid}}
    operator = {
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": network.operator_namespace}
        },
        "podSelector": {"matchLabels": dict(network.operator_labels)},
    }
    metrics: dict[str, Any] = {"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]}
    if network.metrics_from:
        metrics["from"] = list(network.metrics_from)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": labels.NETWORK_POLICY,
        "metadata": _metadata(job, service_name(job.name, job.uid)),
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"from": [operator], "ports": [{"port": CONTROL_PORT, "protocol": "TCP"}]},
                metrics,
            ],
        },
    }


def render_disruption_budget(job: Gang, workers: int) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": labels.DISRUPTION_BUDGET,
        "metadata": _metadata(job, service_name(job.name, job.uid)),
        "spec": {
            # For pods without a scale subresource, Kubernetes accepts a number of minAvailable only
            # (https://kubernetes.io/docs/tasks/run-application/configure-pdb).
            "minAvailable": workers - 1,
            "selector": {"matchLabels": {labels.JOB_UID: job.uid}},
            "unhealthyPodEvictionPolicy": "IfHealthyBudget",
        },
    }


def standing_objects(job: Gang, workers: int, sidecar: SidecarSettings) -> list[dict[str, Any]]:
    """Return NetworkPolicy, Service and PodDisruptionBudget of a gang of this number of workers."""
    network = sidecar.network
    policies = [] if network is None else [render_network_policy(job, network)]
    return [*policies, render_service(job), render_disruption_budget(job, workers)]


def render_certificates(job: Gang, name: str) -> dict[str, Any]:
    return render_secret(_metadata(job, name))


def render_secret(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return an immutable Secret without its data, which only the edge has."""
    return {
        "apiVersion": "v1",
        "kind": labels.SECRET,
        "type": "Opaque",
        "immutable": True,
        "metadata": dict(metadata),
    }


def render_checkpoint(job: Gang, name: str, step: Step, status: CheckpointStatus) -> dict[str, Any]:
    """Return the object that records a commit. Its status is written after its creation."""
    return {
        "apiVersion": API_VERSION,
        "kind": Checkpoint.KIND,
        "metadata": {"name": name, "namespace": job.namespace, "labels": job_labels(job)},
        "spec": {
            "jobRef": {"name": job.name},
            "step": step,
            "deletionPolicy": DeletionPolicy.RETAIN.value,
        },
        "status": merge_patch(status),
    }


def render_change(
    checkpoint: Checkpoint, status: CheckpointStatus, step: Step | None = None
) -> dict[str, Any]:
    """Return the change of a Checkpoint: its status, and before it spec.step if given."""
    body: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": Checkpoint.KIND,
        "metadata": {
            "name": checkpoint.name,
            "namespace": checkpoint.namespace,
            "resourceVersion": checkpoint.resource_version,
        },
        "status": merge_patch(status),
    }
    if step is not None:
        body["spec"] = {"step": step}
    return body


HOLDFAST_GROUP = 65532
"""User and group of the sidecar, and default fsGroup of the pod: both containers share files by group."""
EXIT_SECONDS = 5
"""Part of the grace period that the preStop hook leaves for the sidecar to exit. The admission policy for
adopted pods leaves the same."""

_START_SECONDS = 60
"""Longest time that one startup probe waits for the sidecar."""
_FIRST_TRAINING_SECONDS = 280
"""Longest time that one readiness probe waits until the ranks train for the first time."""
_PROBE_SECONDS = 5
"""What a probe may take beside its wait."""

SHARED_VOLUME = "holdfast-shared"
STORE_VOLUME = "holdfast-store"
POD_IP_VARIABLE = "HOLDFAST_POD_IP"
_OF_A_POD = frozenset(
    {f"{PREFIX}WORKER", f"{PREFIX}POD_NAME", f"{PREFIX}STOP_SECONDS", POD_IP_VARIABLE}
)


def render_pod(
    job: Gang,
    worker: Worker,
    birth_round: RestartRound,
    store: StoreView | None,
    sidecar: SidecarSettings,
    avoided_nodes: Sequence[str] = (),
    failed_nodes: Sequence[str] = (),
    group: PodGroup | None = None,
    certificates: str = "",
) -> dict[str, Any]:
    """Return the body of a worker's pod. The template must have passed `spec.template_problem`.

    Args:
        job: The job, with the template in its spec.
        worker: Index of the worker.
        birth_round: Round in which the pod is created.
        store: Store of the job, or None.
        sidecar: Settings of the sidecar container.
        avoided_nodes: Names of lost nodes that the pod's node affinity excludes.
        failed_nodes: Names of nodes that it excludes because workers failed there.
        group: The pod group in Kueue that it joins, or None.
        certificates: Secret with its certificate. "" means the first name for it.
    """
    template = copy.deepcopy(dict(job.spec.template or {}))
    user_meta = template.get("metadata") or {}
    spec: dict[str, Any] = dict(template.get("spec") or {})
    name = pod_name(job.name, job.uid, worker, birth_round)
    containers = [dict(c) for c in spec.get("containers") or []]
    trainer = next(c for c in containers if c.get("name") == TRAINER_CONTAINER)
    _complete_trainer(trainer, job, worker, birth_round)
    spec["containers"] = containers
    spec["initContainers"] = [
        _sidecar_container(job, worker, birth_round, store, sidecar, name),
        *(spec.get("initContainers") or []),
    ]
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        *_volumes(job, worker, birth_round, store, trainer, certificates),
    ]
    spec["restartPolicy"] = "OnFailure"
    spec["terminationGracePeriodSeconds"] = grace_of(job).total_seconds
    spec["hostname"] = name
    spec["subdomain"] = service_name(job.name, job.uid)
    spec["automountServiceAccountToken"] = False
    spec["securityContext"] = _pod_security(spec.get("securityContext") or {})
    spec["affinity"] = _spread(spec.get("affinity") or {}, job)
    annotations = dict(user_meta.get("annotations") or {})
    excluded = {labels.AVOIDED_NODES: avoided_nodes, labels.FAILED_NODES: failed_nodes}
    for annotation, nodes in excluded.items():
        annotations.pop(annotation, None)
        if nodes:
            annotations[annotation] = ",".join(nodes)
    if avoided_nodes or failed_nodes:
        affinity, nodes = spec["affinity"], sorted({*avoided_nodes, *failed_nodes})
        affinity["nodeAffinity"] = _avoiding(affinity.get("nodeAffinity") or {}, nodes)
    annotations.update(group_annotations(group))
    metadata = {
        "name": name,
        "namespace": job.namespace,
        "labels": {
            **(user_meta.get("labels") or {}),
            **worker_labels(job, worker, birth_round),
            **group_labels(group),
        },
        "ownerReferences": [owner_reference(job)],
    }
    annotations[labels.RENDERED_FROM] = to_annotation(part_digests(job))
    metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": labels.POD, "metadata": metadata, "spec": spec}


# --------------------------------------------------------------------------- trainer


def _worker_contract(job: Gang, worker: Worker, birth_round: RestartRound) -> WorkerContract:
    return WorkerContract(
        job_uid=job.uid,
        job=job.name,
        namespace=job.namespace,
        worker=worker,
        birth_round=birth_round,
        procs_per_worker=job.spec.procs_per_worker,
        shared_dir=SHARED_DIR,
    )


def trainer_contract(job: Gang, worker: Worker, birth_round: RestartRound) -> PodContract:
    """Return the environment of the trainer container, without the pod's time to stop."""
    return PodContract(
        **asdict(_worker_contract(job, worker, birth_round)),
        slots=job.spec.checkpoint.memory.slots,
    )


def sidecar_contract(
    job: Gang, worker: Worker, birth_round: RestartRound, store: StoreView | None, name: str
) -> SidecarContract:
    """Return the environment of the sidecar container, without the pod's address."""
    return SidecarContract(
        **asdict(_worker_contract(job, worker, birth_round)),
        pod_name=name,
        pod_ip="",
        node_dir=NODE_DIR,
        node_capacity_bytes=job.spec.checkpoint.node.volume_bytes,
        certs_dir=CERTS_DIR,
        store_dir=STORE_DIR,
        store="" if store is None else store.config.to_json(),
    )


def _complete_trainer(
    trainer: dict[str, Any], job: Gang, worker: Worker, birth_round: RestartRound
) -> None:
    contract = trainer_contract(job, worker, birth_round)
    ours = replace(contract, stop_seconds=grace_of(job).stop_seconds).to_env()
    trainer["env"] = [
        *(e for e in trainer.get("env") or [] if e.get("name") not in ours),
        *_env(ours),
    ]
    trainer["volumeMounts"] = [
        *(trainer.get("volumeMounts") or []),
        {"name": SHARED_VOLUME, "mountPath": SHARED_DIR},
    ]
    if trainer.get("securityContext") is None:
        trainer["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def _env(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": k, "value": v} for k, v in values.items()]


# --------------------------------------------------------------------------- sidecar


def _sidecar_container(
    job: Gang,
    worker: Worker,
    birth_round: RestartRound,
    store: StoreView | None,
    settings: SidecarSettings,
    name: str,
) -> dict[str, Any]:
    values = sidecar_contract(job, worker, birth_round, store, name).to_env()
    values.pop(POD_IP_VARIABLE)
    mounts: list[dict[str, Any]] = [
        {"name": SHARED_VOLUME, "mountPath": SHARED_DIR},
        {"name": NODE_VOLUME, "mountPath": NODE_DIR},
        {"name": CERTS_VOLUME, "mountPath": CERTS_DIR, "readOnly": True},
    ]
    if store_sources(store):
        mounts.append({"name": STORE_VOLUME, "mountPath": STORE_DIR, "readOnly": True})
    return {
        "name": SIDECAR_CONTAINER,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        # An init container with Always is a native sidecar: it starts before the trainer, and the pod can end
        # while it runs.
        "restartPolicy": "Always",
        "env": [
            {"name": POD_IP_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *_env(values),
        ],
        "ports": [
            {"name": "control", "containerPort": CONTROL_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "startupProbe": {
            # The probe waits until the socket listens, because the kubelet writes a warning for each failed
            # probe. It does not wait for the restore barrier: a long rehydration is not a failed start.
            "exec": {"command": ["holdfast-sidecar", "healthz", "--timeout", str(_START_SECONDS)]},
            "periodSeconds": 1,
            "timeoutSeconds": _START_SECONDS + _PROBE_SECONDS,
            "failureThreshold": 3,
        },
        # The pod is ready while its ranks train, because the PodDisruptionBudget counts ready pods. A command
        # every two seconds would take time from training. The answer waits for the first training, so that
        # the kubelet writes no warnings about a start that is healthy.
        "readinessProbe": {
            "httpGet": {
                "path": f"/readyz?wait={_FIRST_TRAINING_SECONDS}",
                "port": METRICS_PORT,
            },
            "periodSeconds": 2,
            "timeoutSeconds": _FIRST_TRAINING_SECONDS + _PROBE_SECONDS,
            "failureThreshold": 1,
        },
        "lifecycle": {"preStop": {"exec": {"command": _drain_command(job)}}},
        # Without a CPU limit, because throttling would delay the durable write of a step.
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        },
        "volumeMounts": mounts,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": HOLDFAST_GROUP,
            "runAsGroup": HOLDFAST_GROUP,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _drain_command(job: Gang) -> list[str]:
    seconds = max(1, grace_of(job).total_seconds - EXIT_SECONDS)
    return ["holdfast-sidecar", "pre-stop", "--timeout", str(seconds)]


# --------------------------------------------------------------------------- volumes


def _volumes(
    job: Gang,
    worker: Worker,
    birth_round: RestartRound,
    store: StoreView | None,
    trainer: Mapping[str, Any],
    certificates: str,
) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {"medium": "Memory"}
    limit = job.spec.checkpoint.memory.size_limit_bytes or _memory_limit_bytes(trainer)
    if limit is not None:
        shared["sizeLimit"] = str(limit)
    name = pod_name(job.name, job.uid, worker, birth_round)
    items = [{"key": k, "path": path} for k, path in certificate_items(name)]
    volumes: list[dict[str, Any]] = [
        {"name": SHARED_VOLUME, "emptyDir": shared},
        _node_volume(job),
        {
            "name": CERTS_VOLUME,
            "secret": {
                "secretName": certificates
                or certificates_secret_name(job.name, job.uid, worker, birth_round),
                "defaultMode": 0o440,
                "items": items,
            },
        },
    ]
    sources = store_sources(store)
    if sources:
        volumes.append(
            {"name": STORE_VOLUME, "projected": {"defaultMode": 0o440, "sources": sources}}
        )
    return volumes


def _node_volume(job: Gang) -> dict[str, Any]:
    node = job.spec.checkpoint.node
    claim = node.volume.claim
    if claim is None:
        return {"name": NODE_VOLUME, "emptyDir": {"sizeLimit": str(node.volume_bytes)}}
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": claim.storage_class_name,
        "resources": {"requests": {"storage": claim.size}},
    }
    return {"name": NODE_VOLUME, "ephemeral": {"volumeClaimTemplate": {"spec": spec}}}


def store_sources(store: StoreView | None) -> list[dict[str, Any]]:
    """Return the sources of one projected volume: the store's credentials, and the CA's ca.crt."""
    sources: list[dict[str, Any]] = []
    if store is None:
        return sources
    if store.credentials_secret is not None:
        sources.append({"secret": {"name": store.credentials_secret}})
    if store.token_audience is not None:
        token = {"audience": store.token_audience, "expirationSeconds": 3600}
        sources.append({"serviceAccountToken": {**token, "path": WEB_TOKEN_FILE}})
    if store.ca_secret is not None:
        items = [{"key": "ca.crt", "path": "ca.crt"}]
        sources.append({"secret": {"name": store.ca_secret, "items": items}})
    return sources


def _memory_limit_bytes(trainer: Mapping[str, Any]) -> int | None:
    limits = (trainer.get("resources") or {}).get("limits") or {}
    memory = limits.get("memory")
    return None if memory is None else parse_quantity_bytes(str(memory))


# --------------------------------------------------------------------------- placement, security


def _pod_security(user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod's security context: the restricted profile, overridden by the template's fields.

    If the template sets runAsUser 0, runAsNonRoot is left out. The Pod Security of the namespace decides
    whether such a pod may run.
    """
    context: dict[str, Any] = {"fsGroup": HOLDFAST_GROUP}
    if user.get("runAsUser") != 0:
        context["runAsNonRoot"] = True
    context["seccompProfile"] = {"type": "RuntimeDefault"}
    return {**context, **copy.deepcopy(dict(user))}


def _spread(user: Mapping[str, Any], job: Gang) -> dict[str, Any]:
    """Return the affinity with a preference for nodes that run no other worker of the job.

    A lost node then costs only one worker, and every peer copy can be on another node.
    """
    affinity = copy.deepcopy(dict(user))
    anti = dict(affinity.get("podAntiAffinity") or {})
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    term = {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": {labels.JOB_UID: job.uid}},
            "topologyKey": "kubernetes.io/hostname",
        },
    }
    anti[key] = [*(anti.get(key) or []), term]
    affinity["podAntiAffinity"] = anti
    return affinity


def _avoiding(user: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """Return the template's node affinity, restricted to exclude these nodes.

    A node fits if it meets all requirements of at least one term, so each term gets the additional ones. A
    term without requirements matches no node and stays empty: with ours it would match nearly all nodes. Each
    requirement on a field may contain only one node name, so there is one for each node.
    """
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in nodes]
    required = user.get(key)
    if not required:
        return {**user, key: {"nodeSelectorTerms": [{"matchFields": fields}]}}
    terms = [
        {**term, "matchFields": [*(term.get("matchFields") or []), *fields]}
        if term.get("matchFields") or term.get("matchExpressions")
        else term
        for term in required.get("nodeSelectorTerms") or []
    ]
    return {**user, key: {**required, "nodeSelectorTerms": terms}}


# --------------------------------------------------------------------------- other pods


def render_placeholder(
    job: Gang, worker: Worker, store: StoreView | None, sidecar: SidecarSettings
) -> dict[str, Any]:
    """Return the body of the placeholder of this worker.

    It has no label by which the Service, the PodDisruptionBudget or the command line select workers.
    """
    body = render_pod(job, worker, RestartRound(0), store, sidecar)
    name, spec, metadata = (
        placeholder_name(job.name, job.uid, worker),
        body["spec"],
        body["metadata"],
    )
    of_worker = (labels.JOB_UID, labels.WORKER, labels.BIRTH_ROUND)
    kept = {k: v for k, v in metadata["labels"].items() if k not in of_worker}
    metadata["labels"] = {**kept, labels.COMPONENT: labels.COMPONENT_PLACEHOLDER}
    metadata["name"] = name
    del spec["hostname"], spec["subdomain"]
    spec["terminationGracePeriodSeconds"] = 1
    [certificates] = (v for v in spec["volumes"] if v.get("name") == CERTS_VOLUME)
    certificates["secret"] = {"secretName": name}
    return body


def injection(job: CheckpointAdoption, store: StoreView | None) -> InjectionStatus:
    """Return the part of the pods that is the same for all workers of the gang."""
    worker, birth = Worker(0), RestartRound(0)
    memory, node = job.spec.checkpoint.memory, job.spec.checkpoint.node
    return InjectionStatus(
        trainer_env=_shared(trainer_contract(job, worker, birth).to_env()),
        sidecar_env=_shared(sidecar_contract(job, worker, birth, store, "").to_env()),
        certificates=certificates_prefix(job),
        workers_per_secret=CERTIFICATES_IN_SECRET,
        node_size=str(node.volume_bytes),
        shared_size=None if memory.size_limit_bytes is None else str(memory.size_limit_bytes),
        credentials_secret=None if store is None else store.credentials_secret,
        ca_secret=None if store is None else store.ca_secret,
        token_audience=None if store is None else store.token_audience,
    )


def _shared(values: Mapping[str, str]) -> tuple[Variable, ...]:
    return tuple(
        Variable(name=name, value=value) for name, value in values.items() if name not in _OF_A_POD
    )
