"""Labels and owner references of the objects of a job."""

from __future__ import annotations

from typing import Any

from holdfast_core.api import API_VERSION, Gang
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.model import labels
from holdfast_operator.model.job import PodGroup


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


def owner_reference(job: Gang) -> dict[str, Any]:
    """Return the controller reference by which the object is deleted with its job."""
    return {
        "apiVersion": API_VERSION,
        "kind": job.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
