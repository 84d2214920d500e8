"""The placeholder of a missing worker: a pod that takes a node and runs nothing. Pure.

It is the pod of a worker with another name, so the scheduler, quotas and admission webhooks treat it as they
would treat that pod. It waits for a Secret that never exists. A kubelet starts the containers of a pod only
when all of its volumes are mounted (https://kubernetes.io/docs/concepts/configuration/secret), so no image is
pulled and no container starts.
"""

from __future__ import annotations

from typing import Any

from holdfast_core.api import Gang
from holdfast_core.contract import CERTS_VOLUME
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import placeholder_name
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import StoreView
from holdfast_operator.render.pod import render_pod


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
