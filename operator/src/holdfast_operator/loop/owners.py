"""Look up the controller that creates an adopted gang's pods.

Job, JobSet and TrainJob create pods through Jobs of batch/v1. The operator reads such a Job once, because its
restart policy is immutable.
"""

from __future__ import annotations

from holdfast_core.api import CheckpointAdoption, Gang
from holdfast_core.ids import JobUid
from holdfast_operator.decide.report.owners import NO_OWNER, other_owner, owner_of_job
from holdfast_operator.kube.cluster import JOB, Cluster
from holdfast_operator.model.job import Owner, OwnerView, PodView


class Owners:
    """The controllers of adopted pods that this process has looked up."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[JobUid, tuple[str, OwnerView]] = {}
        """uid of the controller and what is known of it, by uid of the adoption."""

    async def of(self, job: Gang, pods: tuple[PodView, ...]) -> OwnerView | None:
        """Return the controller of the gang's pods, or None if there is no pod yet. Raises ApiError."""
        if not isinstance(job, CheckpointAdoption) or not pods:
            return None
        newest = max(pods, key=lambda p: (p.created, p.name))
        controller = newest.controller
        uid = "" if controller is None else controller.uid
        known = self._known.get(job.uid)
        if known is not None and known[0] == uid:
            return known[1]
        found = NO_OWNER if controller is None else await self._read(job.namespace, controller)
        self._known[job.uid] = (uid, found)
        return found

    async def _read(self, namespace: str, controller: Owner) -> OwnerView:
        if (controller.group, controller.kind) != ("batch", "Job"):
            return other_owner(controller.kind, controller.name)
        raw = await self._cluster.get(JOB, namespace, controller.name)
        return NO_OWNER if raw is None else owner_of_job(raw)

    def forget(self, uid: JobUid) -> None:
        self._known.pop(uid, None)
