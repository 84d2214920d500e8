"""Gangs of the example trainer whose pods a TrainJob creates, by the ClusterTrainingRuntime of the chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from testbed.driver import install
from testbed.driver.adopted import AdoptedObject, OwnerKind, batch_job_manifest
from testbed.driver.jobs import TRAINER_IMAGE, Training
from testbed.driver.kube import Kube, Object, ignore_missing, wait_for

RUNTIMES = {
    "group": "trainer.kubeflow.org",
    "version": "v1alpha1",
    "plural": "clustertrainingruntimes",
}


def rendered_runtime() -> Object:
    """Return the ClusterTrainingRuntime of the chart, whose pods meet Pod Security `restricted`."""
    job = batch_job_manifest("template", "default", Training())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {
        "enabled": True,
        "image": TRAINER_IMAGE,
        "podSecurityContext": pod["securityContext"],
        "securityContext": container["securityContext"],
        "tolerations": pod["tolerations"],
    }
    arguments = ["--show-only", "templates/training-runtime.yaml"]
    for kind in (
        "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy",
        "trainer.kubeflow.org/v1alpha1/ClusterTrainingRuntime",
    ):
        arguments += ["--api-versions", kind]
    arguments += ["--set", "adoption.enabled=true"]
    arguments += ["--set-json", f"adoption.trainingRuntime={json.dumps(values)}"]
    text = install.helm("template", install.RELEASE, str(install.CHART), *arguments)
    (runtime,) = (document for document in yaml.safe_load_all(text) if document)
    return dict(runtime)


@contextmanager
def training_runtime(kube: Kube) -> Iterator[None]:
    """Create the runtime of the chart without the rest of it, and delete it at the end.

    The controller keeps a finalizer on a runtime while a TrainJob uses it.
    """
    custom, runtime = client.CustomObjectsApi(kube.api), rendered_runtime()
    named = {**RUNTIMES, "name": runtime["metadata"]["name"]}
    _delete(custom, named)
    custom.create_cluster_custom_object(**RUNTIMES, body=runtime)
    try:
        yield
    finally:
        _delete(custom, named)


def _delete(custom: client.CustomObjectsApi, named: dict[str, str]) -> None:
    def is_gone() -> bool:
        try:
            custom.get_cluster_custom_object(**named)
        except ApiException as error:
            if error.status == 404:
                return True
            raise
        return False

    with ignore_missing():
        custom.delete_cluster_custom_object(**named)
    wait_for(f"{named['plural']} {named['name']} to be deleted", is_gone)


def trainjob_manifest(name: str, namespace: str, training: Training) -> Object:
    trainer: dict[str, Any] = {
        "numNodes": training.workers,
        "command": training.command(),
        "resourcesPerNode": {"limits": {"memory": "1Gi"}},
    }
    return {
        "apiVersion": AdoptedTrainJob.OWNER.api_version,
        "kind": AdoptedTrainJob.OWNER.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"runtimeRef": {"name": "holdfast-torch"}, "trainer": trainer},
    }


@dataclass(slots=True)
class AdoptedTrainJob(AdoptedObject):
    """A CheckpointAdoption, and the TrainJob of the same name whose JobSet creates its pods."""

    CONTAINER: ClassVar[str] = "node"
    OWNER: ClassVar[OwnerKind] = OwnerKind(
        "trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", "Complete", "kubeflow-trainer"
    )

    def owner_manifest(self, job: Object, training: Training) -> Object:
        return trainjob_manifest(self.name, self.namespace, training)
