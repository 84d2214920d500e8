"""Which object an object belongs to, and the keys of the work queue. Pure.

Labels do not prove ownership: any user who may create pods can copy a label, and a job's uid is public
(ADR 0002). A pod is a worker of a job if it is in the job's namespace, its controller reference has the
job's kind and uid, and its name is one that the operator gives to a worker of that job.

A key of the work queue identifies one object and holds none of its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast_core.api import GROUP, CheckpointAdoption, CheckpointStore, Gang, TrainingJob
from holdfast_core.contract import SIDECAR_CONTAINER
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.names import parse_placeholder_name, parse_pod_name, worker_name
from holdfast_operator.model import labels
from holdfast_operator.model.job import Owner, Unreadable

PROBE_PREFIX = "holdfast-probe-"
"""Prefix of the names of store probe pods."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Job, worker index and birth round of a pod, from its name and its controller reference."""

    job: str
    job_uid: JobUid
    worker: Worker
    birth_round: RestartRound
    identity: str = ""
    """Name of an adopted pod in its certificate. "" means the pod's name."""
    placeholder: bool = False
    """Whether the pod only looks for a node for this worker."""


def controller_of(raw: Mapping[str, Any]) -> Owner | None:
    """Return the controller of an object if its kind is in our API group, else None."""
    references = (raw.get("metadata") or {}).get("ownerReferences")
    for reference in references if isinstance(references, list) else []:
        if not isinstance(reference, Mapping) or reference.get("controller") is not True:
            continue
        found = _owner(reference)
        return found if found.group == GROUP else None  # an object has one controller at most
    return None


def _owner(reference: Mapping[str, Any]) -> Owner:
    return Owner(
        kind=str(reference.get("kind")),
        name=str(reference.get("name")),
        uid=str(reference.get("uid")),
        group=str(reference.get("apiVersion")).partition("/")[0],
    )


def worker_identity(raw: Mapping[str, Any]) -> WorkerIdentity | None:
    """Return the identity of a worker pod or a placeholder, or None for any other pod.

    Labels are not read.
    """
    owner = controller_of(raw)
    if owner is None or owner.kind != TrainingJob.KIND:
        return None
    uid = JobUid(owner.uid)
    name = str(raw["metadata"].get("name"))
    found = parse_pod_name(owner.name, uid, name)
    if found is not None:
        return WorkerIdentity(owner.name, uid, *found)
    worker = parse_placeholder_name(owner.name, uid, name)
    if worker is None:
        return None
    return WorkerIdentity(owner.name, uid, worker, RestartRound(0), placeholder=True)


def adopted_identity(raw: Mapping[str, Any]) -> WorkerIdentity | None:
    """Return the identity of a pod that a CheckpointAdoption adopted, or None for any other pod.

    The admission policy writes these labels and adds the sidecar. Labels decide here, because another
    controller owns the pod. A pod that only copies them has no certificate of the worker, so no sidecar and
    no operator accepts it (ADR 0015).
    """
    meta, spec = raw.get("metadata") or {}, raw.get("spec") or {}
    pod_labels = meta.get("labels") or {}
    name, uid, worker = (
        str(pod_labels.get(k) or "") for k in (labels.JOB_NAME, labels.JOB_UID, labels.WORKER)
    )
    injected = any(c.get("name") == SIDECAR_CONTAINER for c in spec.get("initContainers") or [])
    if not (name and uid and injected and worker.isdecimal()):
        return None
    index = Worker(int(worker))
    return WorkerIdentity(name, JobUid(uid), index, RestartRound(0), worker_name(index))


def other_controller(raw: Mapping[str, Any]) -> Owner | None:
    """Return the controller of an adopted pod, or None if it has none."""
    for reference in (raw.get("metadata") or {}).get("ownerReferences") or []:
        if reference.get("controller") is True:
            return _owner(reference)
    return None


def probed_store(raw: Mapping[str, Any]) -> Owner | None:
    """Return the CheckpointStore that a pod probes, or None for any other pod."""
    owner = controller_of(raw)
    if owner is None or owner.kind != CheckpointStore.KIND:
        return None
    return owner if str(raw["metadata"].get("name")).startswith(PROBE_PREFIX) else None


def whose(raw: Mapping[str, Any]) -> str:
    """Describe the controller of an object, for messages."""
    references = (raw.get("metadata") or {}).get("ownerReferences") or []
    for reference in references:
        if isinstance(reference, Mapping) and reference.get("controller") is True:
            return (
                f"{reference.get('kind')} {reference.get('name')} (uid {reference.get('uid')}) "
                "controls it"
            )
    return "it has no controller"


# --------------------------------------------------------------------------- keys of the work queue


class KeyKind(StrEnum):
    JOB = "job"
    ADOPTION = "adoption"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Key:
    kind: KeyKind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def job_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.JOB, namespace, name)


def adoption_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.ADOPTION, namespace, name)


def gang_key(gang: Gang | Unreadable) -> Key:
    """Return the key of a TrainingJob or a CheckpointAdoption."""
    kind = KeyKind.ADOPTION if gang.kind == CheckpointAdoption.KIND else KeyKind.JOB
    return Key(kind, gang.namespace, gang.name)


def store_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.STORE, namespace, name)
