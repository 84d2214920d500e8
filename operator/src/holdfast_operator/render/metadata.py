"""Labels and owner references of the objects of a job."""

from __future__ import annotations

from typing import Any

from holdfast_core.api import API_VERSION, Gang
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.model import labels


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
