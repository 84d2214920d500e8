"""An indexed Job whose ranks save with torch.save. The kubelet restarts containers that fail."""

from __future__ import annotations

from typing import ClassVar

from kubernetes import client
from testbed.driver.adopted import indexed_job_spec
from testbed.driver.kube import Object, ignore_missing

from benchmarks.recovery.jobs import NAMESPACE
from benchmarks.recovery.peers.peer import WORKERS, Peer


class PlainJob(Peer):
    NAME: ClassVar[str] = "plain"
    PROGRAM: ClassVar[str] = "torch_save"
    MASTER_ADDR: ClassVar[str] = "plain-0.plain"
    OWNER_LABEL: ClassVar[str] = "job-name"
    RESTART_POLICY: ClassVar[str] = "OnFailure"

    def create_owner(self, template: Object) -> None:
        metadata = {"name": self.NAME}
        service = {
            "clusterIP": "None",
            "selector": {self.OWNER_LABEL: self.NAME},
            "publishNotReadyAddresses": True,
        }
        self._kube.core.create_namespaced_service(
            NAMESPACE, {"metadata": metadata, "spec": service}
        )
        template = {"spec": {**template["spec"], "subdomain": self.NAME}}
        spec = indexed_job_spec(WORKERS, template, backoff_limit=1000)
        self._jobs.create_namespaced_job(NAMESPACE, {"metadata": metadata, "spec": spec})

    def delete_owner(self) -> None:
        with ignore_missing():
            self._kube.core.delete_namespaced_service(self.NAME, NAMESPACE)
        self._jobs.delete_namespaced_job(self.NAME, NAMESPACE, propagation_policy="Background")

    @property
    def _jobs(self) -> client.BatchV1Api:
        return client.BatchV1Api(self._kube.api)
