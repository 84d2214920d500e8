"""Gangs of the example trainer whose pods a JobSet creates and a CheckpointAdoption adopts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from testbed.driver.adopted import AdoptedObject, OwnerKind
from testbed.driver.jobs import Training
from testbed.driver.kube import Object

JOBSET = OwnerKind("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "Completed", "jobset")


def jobset_manifest(job: Object, *, backoff_limit: int, max_restarts: int) -> Object:
    """Return a JobSet of one replicated job with the spec and the name of this Job."""
    spec = {**job["spec"], "backoffLimit": backoff_limit}
    workers = {"name": "workers", "replicas": 1, "template": {"spec": spec}}
    return {
        "apiVersion": JOBSET.api_version,
        "kind": JOBSET.kind,
        "metadata": job["metadata"],
        "spec": {"replicatedJobs": [workers], "failurePolicy": {"maxRestarts": max_restarts}},
    }


@dataclass(slots=True)
class AdoptedJobSet(AdoptedObject):
    """A CheckpointAdoption, and the JobSet of the same name that creates its pods."""

    OWNER: ClassVar[OwnerKind] = JOBSET

    backoff_limit: int = 10
    """0: the Job fails with its first pod, and JobSet creates all pods again."""
    max_restarts: int = 3

    def owner_manifest(self, job: Object, training: Training) -> Object:
        return jobset_manifest(
            job, backoff_limit=self.backoff_limit, max_restarts=self.max_restarts
        )

    def restarts(self) -> int:
        """Return how often JobSet has created all pods again."""
        return int(self.read_owner().get("status", {}).get("restarts", 0))
