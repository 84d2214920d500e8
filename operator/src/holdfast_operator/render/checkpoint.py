"""The Checkpoint object of a commit. It has no ownerReference, because it must outlive its job."""

from __future__ import annotations

from typing import Any

from holdfast_core.api import (
    API_VERSION,
    Checkpoint,
    CheckpointStatus,
    DeletionPolicy,
    Gang,
    merge_patch,
)
from holdfast_core.ids import Step
from holdfast_operator.render.metadata import job_labels


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
