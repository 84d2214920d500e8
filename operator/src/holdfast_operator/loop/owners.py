"""Find out which controller creates an adopted gang's pods, and what its restart policy costs.

The operator reads only Jobs of batch/v1: Job, JobSet and TrainJob create their pods through them. It reads
each Job once, because the restart policy of a Job is immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_core.api import CheckpointAdoption, Gang
from holdfast_core.ids import JobUid
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model.job import OwnerView, PodView

_DEFAULT_BACKOFF_LIMIT = 6
"""spec.backoffLimit of a Job that does not set it."""


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
        found = NO_OWNER
        if controller is not None and controller.kind != "Job":
            found = other_owner(controller.kind, controller.name)
        elif controller is not None:
            raw = await self._cluster.get_batch_job(job.namespace, controller.name)
            found = NO_OWNER if raw is None else owner_of_job(raw)
        self._known[job.uid] = (uid, found)
        return found

    def forget(self, uid: JobUid) -> None:
        self._known.pop(uid, None)


NO_OWNER = OwnerView(
    "no controller creates a lost pod of this gang again: create it yourself, or let a Job create it",
    loses_all_copies=False,
)


def other_owner(kind: str, name: str) -> OwnerView:
    text = (
        f"{kind} {name} creates the pods, and Holdfast does not know its restart policy: if it deletes the "
        "remaining pods after a failure, only a step in the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)


def owner_of_job(raw: Mapping[str, Any]) -> OwnerView:
    """Return what the restart policy of a Job of batch/v1 costs. Pure."""
    meta, spec = raw["metadata"], raw.get("spec") or {}
    limit = spec.get("backoffLimit")
    limit = _DEFAULT_BACKOFF_LIMIT if limit is None else int(limit)
    job = f"Job {meta['name']} (backoffLimit {limit})"
    parent = next((r for r in meta.get("ownerReferences") or [] if r.get("controller")), None)
    if spec.get("backoffLimitPerIndex") is not None:
        return OwnerView(f"{job} creates a lost pod again, index by index", loses_all_copies=False)
    if limit == 0:
        end = "fails, which deletes the remaining pods"
        if parent is not None:
            end = f"fails, and {parent['kind']} {parent['name']} deletes all pods and creates them again"
        text = (
            f"when one pod fails, {job} {end}: every copy in memory and on nodes is lost, and only a step in "
            "the object store is left"
        )
        return OwnerView(text, loses_all_copies=True)
    text = (
        f"{job} creates a lost pod again. After {limit} failed pods all pods are deleted, and only a step in "
        "the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)
