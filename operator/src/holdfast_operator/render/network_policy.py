"""The NetworkPolicy of a gang, which limits access to its workers. Pure.

Gloo and NCCL choose the ports of ranks, so workers of one job may reach each other on all ports. The operator
may reach the control port, and other clients only the metrics port. The kubelet needs no rule: a pod
always admits its own node. NetworkPolicies are additive, so a tenant can allow more with another policy.
"""

from __future__ import annotations

from typing import Any

from holdfast_core.api import Gang
from holdfast_core.contract import CONTROL_PORT, METRICS_PORT
from holdfast_core.names import service_name
from holdfast_operator.model import kinds, labels
from holdfast_operator.model.installation import WorkerNetwork
from holdfast_operator.render.metadata import job_labels, owner_reference


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
        "kind": kinds.NETWORK_POLICY,
        "metadata": {
            "name": service_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": job_labels(job),
            "ownerReferences": [owner_reference(job)],
        },
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
