"""The records that the reflectors keep of pods and leases: frozen, compared by value.

An event that leaves the record equal is ignored. Objects of our own kinds are kept as core.api parses them.
watch.views parses pods and nodes; this module adds the fields by which the caches look pods up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_core.ids import JobUid
from holdfast_operator.model.job import Owner, PodView
from holdfast_operator.model.keys import Key, adoption_key, job_key
from holdfast_operator.model.ownership import adopted_identity, probed_store, whose, worker_identity
from holdfast_operator.watch.views import (
    pod_view,
)


@dataclass(frozen=True, slots=True)
class ManagedPod:
    """A pod with our label: a WorkerPod, a ProbePod, or a ForeignPod."""

    namespace: str


@dataclass(frozen=True, slots=True)
class ForeignPod(ManagedPod):
    """A pod with our label, but without the controller and name of a worker or probe.

    It is never counted as a worker or probe, called or deleted.
    """

    name: str
    uid: str
    whose: str


@dataclass(frozen=True, slots=True)
class WorkerPod(ManagedPod):
    """The pod of a worker, or a placeholder of a missing one."""

    key: Key
    """Key of the job or adoption to which it belongs."""
    job_uid: JobUid
    view: PodView


@dataclass(frozen=True, slots=True)
class ProbePod(ManagedPod):
    """The pod of a store's probe, with its state and its result."""

    name: str
    uid: str
    store: str
    """Name of the CheckpointStore that controls the pod."""
    store_uid: str
    phase: str
    terminating: bool
    waiting_reason: str | None
    waiting_message: str
    message: str | None
    """Termination message; None while the pod has not ended."""
    unscheduled: str | None
    """The scheduler's message where it found no node, else None."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of a node."""

    node: str
    renewed: str
    """renewTime by the node's own clock, therefore compared for equality only."""


def read_pod(raw: Mapping[str, Any]) -> ManagedPod:
    """Classify a pod by its controller and its name. Labels only select which pods are watched."""
    meta = raw["metadata"]
    namespace = str(meta.get("namespace"))
    store = probed_store(raw)
    if store is not None:
        return _probe_pod(raw, store)
    identity = worker_identity(raw)
    if identity is None:
        return ForeignPod(namespace, str(meta["name"]), str(meta["uid"]), whose(raw))
    key = job_key(namespace, identity.job)
    return WorkerPod(namespace, key, identity.job_uid, pod_view(raw, identity))


def read_adopted_pod(raw: Mapping[str, Any]) -> ManagedPod | None:
    """Return the record of a pod with the label of a CheckpointAdoption, or None if it has no sidecar."""
    identity, namespace = adopted_identity(raw), str(raw["metadata"].get("namespace"))
    if identity is None:
        return None
    key = adoption_key(namespace, identity.job)
    return WorkerPod(namespace, key, identity.job_uid, pod_view(raw, identity))


def _probe_pod(raw: Mapping[str, Any], store: Owner) -> ProbePod:
    meta, status = raw["metadata"], raw.get("status") or {}
    state = ((status.get("containerStatuses") or [{}])[0]).get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated")
    scheduled: Mapping[str, Any] = next(
        (c for c in status.get("conditions") or [] if c.get("type") == "PodScheduled"), {}
    )
    unscheduled = scheduled.get("status") == "False"
    message = None
    if ended is not None:
        message = str(ended.get("message") or "")
    elif status.get("phase") in ("Failed", "Succeeded"):
        message = str(status.get("message") or "")
    return ProbePod(
        namespace=str(meta.get("namespace")),
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        store=store.name,
        store_uid=store.uid,
        phase=str(status.get("phase") or "Pending"),
        terminating=meta.get("deletionTimestamp") is not None,
        waiting_reason=waiting.get("reason"),
        waiting_message=str(waiting.get("message") or ""),
        message=message,
        unscheduled=str(scheduled.get("message") or "") if unscheduled else None,
    )


def read_lease(raw: Mapping[str, Any]) -> Lease:
    spec = raw.get("spec") or {}
    return Lease(str(raw["metadata"]["name"]), str(spec.get("renewTime")))
