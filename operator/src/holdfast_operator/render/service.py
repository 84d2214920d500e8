"""The headless Service of a gang.

It gives users and frameworks stable DNS names. Holdfast itself does not use them.
"""

from __future__ import annotations

from typing import Any

from holdfast_core.api import Gang
from holdfast_core.contract import CONTROL_PORT
from holdfast_core.names import service_name
from holdfast_operator.model import kinds, labels
from holdfast_operator.render.metadata import job_labels, owner_reference


def render_service(job: Gang) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": kinds.SERVICE,
        "metadata": {
            "name": service_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": job_labels(job),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            "clusterIP": "None",
            # Ranks rendezvous before their pods are ready.
            "publishNotReadyAddresses": True,
            "selector": {labels.JOB_UID: job.uid},
            "ports": [{"name": "control", "port": CONTROL_PORT, "protocol": "TCP"}],
        },
    }
