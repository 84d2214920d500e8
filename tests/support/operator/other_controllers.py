"""Controllers of other job kinds, played: tests create the pods that such a controller would create."""

from __future__ import annotations

from typing import Any

from tests.support.operator.operator_bed import WORKERS, OperatorBed
from tests.support.servers.control_plane import ControlPlaneError


class JobController:
    """The controller of a Job of batch/v1, whose pods the test creates."""

    def __init__(self, bed: OperatorBed, *, backoff_limit: int = 6, jobset: bool = False) -> None:
        self._bed = bed
        container = {"name": "train", "image": "example/trainer:1"}
        template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
        metadata: dict[str, Any] = {"name": "gpt"}
        self._labels = {"holdfast.dev/adopt": "gpt"}
        if jobset:  # as the pods of the ClusterTrainingRuntime holdfast-torch
            self._labels = {"holdfast.dev/adopt": "", "jobset.sigs.k8s.io/jobset-name": "gpt"}
            owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "gpt"}
            metadata["ownerReferences"] = [{**owner, "uid": "0", "controller": True}]
        spec = {
            "completions": WORKERS,
            "parallelism": WORKERS,
            "completionMode": "Indexed",
            "backoffLimit": backoff_limit,
            "template": template,
        }
        path = f"/apis/batch/v1/namespaces/{bed.namespace}/jobs"
        self._job = bed.plane.request("POST", path, {"metadata": metadata, "spec": spec})

    def create_pod(self, worker: int, **spec: Any) -> str:
        """Create the pod of an index, as the Job controller does, and return its name."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "gpt", "controller": True}
        body = {
            "metadata": {
                "generateName": f"gpt-{worker}-",
                "labels": {
                    **self._labels,
                    "batch.kubernetes.io/job-completion-index": str(worker),
                },
                "ownerReferences": [{**owner, "uid": self._job["metadata"]["uid"]}],
            },
            "spec": {
                "restartPolicy": "Never",
                "initContainers": [{"name": "fetch-data", "image": "example/data:1"}],
                "containers": [
                    {
                        "name": "train",
                        "image": "example/trainer:1",
                        "env": [{"name": "A", "value": "b"}],
                    },
                    {"name": "logs", "image": "example/logs:1"},
                ],
                **spec,
            },
        }
        path = f"/api/v1/namespaces/{self._bed.namespace}/pods"
        return str(self._bed.plane.request("POST", path, body)["metadata"]["name"])

    def refusal(self, **spec: Any) -> str:
        """Return the message with which the API server refuses a pod, or "" if it accepts the pod."""
        try:
            name = self.create_pod(0, **spec)
        except ControlPlaneError as error:
            return str(error)
        self._bed.kubelet.delete_pod(name)
        return ""


class TrainJobController:
    """The controllers of Kubeflow Trainer 2.0.0 and JobSet 0.8.2, whose pods the test creates.

    A TrainJob becomes a JobSet of its name, whose replicated job `node` becomes a Job.
    """

    def __init__(self, bed: OperatorBed, name: str, runtime: dict[str, Any]) -> None:
        """Create the Job of a TrainJob of WORKERS nodes that uses this ClusterTrainingRuntime."""
        self._bed, self._name = bed, name
        (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name}
        marks = {
            "jobset-name": name,
            "replicatedjob-name": node["name"],
            "replicatedjob-replicas": "1",
            "global-replicas": "1",
            "job-index": "0",
            "job-global-index": "0",
            "restart-attempt": "0",
        }
        self._labels = {f"jobset.sigs.k8s.io/{key}": value for key, value in marks.items()}
        spec = node["template"]["spec"]
        self._template = spec["template"]
        body = {
            "metadata": {
                "name": f"{name}-{node['name']}-0",
                "labels": {**node["template"]["metadata"]["labels"], **self._labels},
                "ownerReferences": [{**owner, "uid": "0", "controller": True}],
            },
            "spec": {
                **spec,
                "completions": WORKERS,
                "parallelism": WORKERS,
                "completionMode": "Indexed",
            },
        }
        path = f"/apis/batch/v1/namespaces/{bed.namespace}/jobs"
        self._job = bed.plane.request("POST", path, body)

    def create_pod(self, worker: int) -> str:
        """Create the pod of an index, and return its name."""
        job, index = self._job["metadata"], "batch.kubernetes.io/job-completion-index"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["name"], "uid": job["uid"]}
        (container,) = self._template["spec"]["containers"]
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{index}']"}}
        values = {
            "PET_NNODES": str(WORKERS),
            "PET_NPROC_PER_NODE": "auto",
            "PET_MASTER_ADDR": f"{job['name']}-0.{self._name}",
            "PET_MASTER_PORT": "29500",
        }
        env: list[dict[str, Any]] = [{"name": key, "value": v} for key, v in values.items()]
        env += [
            {"name": name, "valueFrom": field} for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
        ]
        body = {
            "metadata": {
                "generateName": f"{job['name']}-{worker}-",
                "labels": {
                    **self._template["metadata"]["labels"],
                    **self._labels,
                    index: str(worker),
                },
                "annotations": {index: str(worker)},
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {
                **self._template["spec"],
                "subdomain": self._name,
                "hostname": f"{job['name']}-{worker}",
                "containers": [{**container, "ports": [{"containerPort": 29500}], "env": env}],
            },
        }
        path = f"/api/v1/namespaces/{self._bed.namespace}/pods"
        return str(self._bed.plane.request("POST", path, body)["metadata"]["name"])
