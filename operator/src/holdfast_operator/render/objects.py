"""The objects of a job beside its pods, and the labels and owner references of all. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_core.api import (
    API_VERSION,
    Checkpoint,
    CheckpointStatus,
    CheckpointStore,
    DeletionPolicy,
    Gang,
    merge_patch,
)
from holdfast_core.contract import CONTROL_PORT, METRICS_PORT
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.names import service_name
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings, WorkerNetwork
from holdfast_operator.model.job import PodGroup


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


def owner_reference(owner: Gang | CheckpointStore) -> dict[str, Any]:
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
    checkpoint: Checkpoint,
    status: CheckpointStatus,
    step: Step | None = None,
    finalizers: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the change of a Checkpoint: its status, and before it spec.step and finalizers if given."""
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
    if finalizers:
        body["metadata"]["finalizers"] = list(finalizers)
    return body
