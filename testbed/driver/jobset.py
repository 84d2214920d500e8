"""Gangs of the example trainer whose pods a JobSet creates and a CheckpointAdoption adopts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from testbed.driver.adopted import AdoptedJob
from testbed.driver.kube import Object, is_true, show, wait_for

API = ("jobset.x-k8s.io", "v1alpha2")
PLURAL = "jobsets"


def jobset_manifest(job: Object, *, backoff_limit: int, max_restarts: int) -> Object:
    """Return a JobSet of one replicated job with the spec and the name of this Job."""
    spec = {**job["spec"], "backoffLimit": backoff_limit}
    workers = {"name": "workers", "replicas": 1, "template": {"spec": spec}}
    return {
        "apiVersion": "/".join(API),
        "kind": "JobSet",
        "metadata": job["metadata"],
        "spec": {"replicatedJobs": [workers], "failurePolicy": {"maxRestarts": max_restarts}},
    }


def runs(api: client.ApiClient) -> bool:
    """Return whether the cluster has a JobSet controller that is ready."""
    listed = client.AppsV1Api(api).list_deployment_for_all_namespaces(
        label_selector="app.kubernetes.io/name=jobset"
    )
    return any(item.status.ready_replicas for item in listed.items)


@dataclass(slots=True)
class AdoptedJobSet(AdoptedJob):
    """A CheckpointAdoption, and the JobSet of the same name that creates its pods."""

    backoff_limit: int = 10
    """0: the Job fails with its first pod, and JobSet creates all pods again."""
    max_restarts: int = 3

    def create_owner(self, job: Object) -> None:
        body = jobset_manifest(
            job, backoff_limit=self.backoff_limit, max_restarts=self.max_restarts
        )
        self._jobsets("create", body)

    def delete_owner(self) -> None:
        self._jobsets("delete", self.name, propagation_policy="Background")

    def restarts(self) -> int:
        """Return how often JobSet has created all pods again."""
        return int(self._read().get("status", {}).get("restarts", 0))

    def suspend(self, timeout_seconds: float) -> None:
        """Suspend the JobSet and wait until its pods are gone."""
        self._jobsets("patch", self.name, {"spec": {"suspend": True}})
        wait_for(
            f"pods of JobSet {self.namespace}/{self.name} to be gone",
            lambda: not self.pods(),
            timeout_seconds=timeout_seconds,
            describe=self.describe,
        )

    def resume(self) -> None:
        """Let JobSet create the pods again."""
        self._jobsets("patch", self.name, {"spec": {"suspend": False}})

    def wait_batch_job(self) -> None:
        """Wait until the JobSet is complete."""
        wait_for(
            f"JobSet {self.namespace}/{self.name} to be complete",
            lambda: is_true(self._read(), "Completed"),
            timeout_seconds=120,
            describe=lambda: show(self._read().get("status")),
        )

    def _read(self) -> Object:
        found: Object = self._jobsets("get", self.name)
        return found

    def _jobsets(self, verb: str, *arguments: Any, **options: Any) -> Any:
        custom = client.CustomObjectsApi(self.kube.api)
        call: Callable[..., Any] = getattr(custom, f"{verb}_namespaced_custom_object")
        return call(*API, self.namespace, PLURAL, *arguments, **options)
