"""The Checkpoint object of a commit. It has no ownerReference, because it must outlive its job."""

from __future__ import annotations

from typing import Any

from holdfast_core.api import API_VERSION, Checkpoint, DeletionPolicy, Gang
from holdfast_operator.model.actions import CreateCheckpointObject
from holdfast_operator.render.metadata import job_labels


def render_checkpoint(job: Gang, action: CreateCheckpointObject) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": Checkpoint.KIND,
        "metadata": {"name": action.name, "namespace": job.namespace, "labels": job_labels(job)},
        "spec": {
            "jobRef": {"name": job.name},
            "step": action.step,
            "deletionPolicy": DeletionPolicy.RETAIN.value,
        },
    }
