"""Gangs of the example trainer whose pods another controller creates and a CheckpointAdoption adopts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from holdfast_core.contract import SIDECAR_CONTAINER
from testbed.config import HANG_SECONDS
from testbed.driver.jobs import TRAINER_IMAGE, Job, Training, checkpoint_policy
from testbed.driver.kube import (
    GROUP,
    VERSION,
    Object,
    ignore_missing,
    is_true,
    show,
    wait_for,
)

EVICTED_AFTER_SECONDS = 5
"""Seconds that a pod stays on a node that does not answer. Where a template says nothing, it is 300."""


def adoption_manifest(name: str, namespace: str, workers: int, container: str) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "CheckpointAdoption",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "workers": workers,
            "container": container,
            "checkpoint": checkpoint_policy(),
            "nodeLoss": {"suspectAfterSeconds": 20},
            "failurePolicy": {"maxRestarts": 30, "window": "1h"},
        },
    }


def batch_job_manifest(
    name: str,
    namespace: str,
    training: Training,
    container: str = "trainer",
    *,
    memory_limit: str = "1Gi",
    backoff_limit: int = 10,
) -> Object:
    """Return an indexed Job whose pods meet Pod Security `restricted` and carry the label of adoption."""
    trainer = {
        "name": container,
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": training.command(),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"limits": {"memory": memory_limit}},
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [_leaves(taint) for taint in ("not-ready", "unreachable")],
        "containers": [trainer],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": indexed_job_spec(
            training.workers,
            {"metadata": {"labels": {"holdfast.dev/adopt": name}}, "spec": pod},
            backoff_limit,
        ),
    }


def indexed_job_spec(workers: int, template: Object, backoff_limit: int) -> Object:
    """Return the spec of an indexed Job whose pods run side by side."""
    return {
        "completions": workers,
        "parallelism": workers,
        "completionMode": "Indexed",
        "backoffLimit": backoff_limit,
        "template": template,
    }


def _leaves(taint: str) -> Object:
    return {
        "key": f"node.kubernetes.io/{taint}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": EVICTED_AFTER_SECONDS,
    }


class AdoptedJob(Job):
    """A CheckpointAdoption, and the indexed Job of the same name that creates its pods."""

    KIND = "CheckpointAdoption"

    def start_training(self, training: Training, **options: Any) -> AdoptedJob:
        """Create both objects. The Job is created when its pods will be adopted.

        Args:
            training: What the pods train.
            **options: Keyword arguments of `batch_job_manifest`.
        """
        workers, container = training.workers, self.CONTAINER
        self.start(adoption_manifest(self.name, self.namespace, workers, container))
        job = batch_job_manifest(self.name, self.namespace, training, container, **options)
        self.wait(
            "the policy to add the sidecar", lambda: self._is_adopted(job["spec"]["template"])
        )
        self.create_owner(job, training)
        return self

    def create_owner(self, job: Object, training: Training) -> None:
        """Create this Job, or another object whose controller creates pods that run the same training."""
        self._batch.create_namespaced_job(self.namespace, job)

    def delete_owner(self) -> None:
        self._batch.delete_namespaced_job(
            self.name, self.namespace, propagation_policy="Background"
        )

    def _is_adopted(self, template: Object) -> bool:
        """Return whether the API server would give a sidecar to a pod of this template.

        A policy is in force some seconds after it was created. A pod that is created before trains alone.
        """
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": "0"}
        probe = {"metadata": {"name": "probe", "labels": labels}, "spec": template["spec"]}
        try:
            pod = self.kube.core.create_namespaced_pod(self.namespace, probe, dry_run="All")
        except ApiException:
            return False
        found = self.kube.plain(pod)["spec"].get("initContainers", [])
        return any(container["name"] == SIDECAR_CONTAINER for container in found)

    @property
    def _batch(self) -> client.BatchV1Api:
        return client.BatchV1Api(self.kube.api)

    def pod_names(self) -> list[str]:
        """Return the names of the members' pods, by worker."""
        status = self.status
        names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self.pods()}
        pods = {pod["worker"]: pod["uid"] for pod in status.get("pods") or []}
        return [names.get(pods.get(w, ""), "") for w in range(len(status.get("members") or []))]

    def wait_batch_job(self) -> None:
        """Wait until the Job is complete."""
        wait_for(
            f"Job {self.namespace}/{self.name} to be complete",
            lambda: is_true(self._batch_job(), "Complete"),
            describe=lambda: show(self._batch_job().get("status")),
        )

    def _batch_job(self) -> Object:
        found: Object = self.kube.plain(self._batch.read_namespaced_job(self.name, self.namespace))
        return found

    def delete(self, timeout_seconds: float = HANG_SECONDS) -> None:
        """Delete both objects, and wait until nothing of the gang is left."""
        with ignore_missing():
            self.delete_owner()
        super().delete(timeout_seconds)


@dataclass(frozen=True, slots=True)
class OwnerKind:
    """A kind of custom objects whose controller creates pods, and that can be suspended."""

    group: str
    version: str
    kind: str
    plural: str
    complete: str
    """Condition of an object whose pods have all succeeded."""
    app: str
    """Label `app.kubernetes.io/name` of the controller."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    def is_served(self, api: client.ApiClient) -> bool:
        """Return whether a controller of this kind is ready in the cluster."""
        listed = client.AppsV1Api(api).list_deployment_for_all_namespaces(
            label_selector=f"app.kubernetes.io/name={self.app}"
        )
        return any(item.status.ready_replicas for item in listed.items)

    def request(
        self, api: client.ApiClient, verb: str, namespace: str, *arguments: Any, **options: Any
    ) -> Any:
        """Send a request about objects of this kind.

        Args:
            api: The API server.
            verb: First word of a method of CustomObjectsApi, such as create.
            namespace: Namespace of the objects.
            *arguments: What the method takes after the plural.
            **options: Keyword arguments of the method.
        """
        custom = client.CustomObjectsApi(api)
        call: Callable[..., Any] = getattr(custom, f"{verb}_namespaced_custom_object")
        return call(self.group, self.version, namespace, self.plural, *arguments, **options)


class AdoptedObject(AdoptedJob):
    """A CheckpointAdoption, and an object of OWNER and of the same name whose controller creates its pods."""

    OWNER: ClassVar[OwnerKind]

    def owner_manifest(self, job: Object, training: Training) -> Object:
        """Return the object. Its pods run the same training as those of this Job."""
        raise NotImplementedError

    def create_owner(self, job: Object, training: Training) -> None:
        self._objects("create", self.owner_manifest(job, training))

    def delete_owner(self) -> None:
        self._objects("delete", self.name, propagation_policy="Background")

    def read_owner(self) -> Object:
        found: Object = self._objects("get", self.name)
        return found

    def suspend(self) -> None:
        """Suspend the object and wait until its pods are gone."""
        self._objects("patch", self.name, {"spec": {"suspend": True}})
        wait_for(
            f"pods of {self.OWNER.kind} {self.namespace}/{self.name} to be gone",
            lambda: not self.pods(),
            describe=self.describe,
        )

    def resume(self) -> None:
        """Let the controller create the pods again."""
        self._objects("patch", self.name, {"spec": {"suspend": False}})

    def wait_batch_job(self) -> None:
        """Wait until the object is complete."""
        wait_for(
            f"{self.OWNER.kind} {self.namespace}/{self.name} to be complete",
            lambda: is_true(self.read_owner(), self.OWNER.complete),
            describe=lambda: show(self.read_owner().get("status")),
        )

    def _objects(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return self.OWNER.request(self.kube.api, verb, self.namespace, *arguments, **options)
