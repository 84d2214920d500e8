"""A JobSet whose ranks save with DCP's `async_save`. JobSet creates all pods again when one fails.

That is how JobSet restarts a gang whose ranks cannot go on without one of them: its Job has no back-off limit
of its own (`backoffLimit: 0`), so it fails with its first pod.
"""

from __future__ import annotations

from typing import ClassVar

from testbed.driver.adopted import indexed_job_spec
from testbed.driver.jobset import JOBSET, jobset_manifest
from testbed.driver.kube import Object

from benchmarks.recovery.jobs import NAMESPACE
from benchmarks.recovery.peers.peer import WORKERS, Peer


class JobSetOfDcp(Peer):
    NAME: ClassVar[str] = "jobset"
    PROGRAM: ClassVar[str] = "dcp_async"
    MASTER_ADDR: ClassVar[str] = "jobset-workers-0-0.jobset"
    OWNER_LABEL: ClassVar[str] = "jobset.sigs.k8s.io/jobset-name"
    RESTART_POLICY: ClassVar[str] = "Never"

    def create_owner(self, template: Object) -> None:
        job = {"metadata": {"name": self.NAME}, "spec": indexed_job_spec(WORKERS, template, 0)}
        manifest = jobset_manifest(job, backoff_limit=0, max_restarts=1000)
        JOBSET.request(self._kube.api, "create", NAMESPACE, manifest)

    def delete_owner(self) -> None:
        JOBSET.request(
            self._kube.api, "delete", NAMESPACE, self.NAME, propagation_policy="Background"
        )
