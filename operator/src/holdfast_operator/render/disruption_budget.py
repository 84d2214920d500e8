"""The PodDisruptionBudget of a gang, which lets one worker at a time be evicted. Pure.

A worker counts as healthy while its ranks train (the readiness probe of its sidecar). So no worker can be
evicted while another one leaves, starts or restores: the shards on the others may then be the last copies.
"""

from __future__ import annotations

from typing import Any

from holdfast_core.api import Gang
from holdfast_core.names import service_name
from holdfast_operator.model import kinds, labels
from holdfast_operator.render.metadata import job_labels, owner_reference


def render_disruption_budget(job: Gang, workers: int) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": kinds.DISRUPTION_BUDGET,
        "metadata": {
            "name": service_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": job_labels(job),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            # For pods without a scale subresource, Kubernetes accepts a number of minAvailable only
            # (https://kubernetes.io/docs/tasks/run-application/configure-pdb).
            "minAvailable": workers - 1,
            "selector": {"matchLabels": {labels.JOB_UID: job.uid}},
            "unhealthyPodEvictionPolicy": "IfHealthyBudget",
        },
    }
