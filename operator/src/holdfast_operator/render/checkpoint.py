"""The Checkpoint object of a commit. It has no ownerReference, because it must outlive its job."""

from __future__ import annotations

from typing import Any

from holdfast_core.api import API_VERSION, Checkpoint, TrainingJob
from holdfast_operator.model import labels
from holdfast_operator.model.actions import CreateCheckpointObject
from holdfast_operator.render.metadata import job_labels


def render_checkpoint(job: TrainingJob, action: CreateCheckpointObject) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": action.name,
        "namespace": job.namespace,
        "labels": job_labels(job),
    }
    if action.deletion_policy == "DeleteData":
        metadata["finalizers"] = [labels.DATA_FINALIZER]
    return {
        "apiVersion": API_VERSION,
        "kind": Checkpoint.KIND,
        "metadata": metadata,
        "spec": {
            "jobRef": {"name": job.name},
            "step": action.checkpoint.step,
            "deletionPolicy": action.deletion_policy,
        },
    }
