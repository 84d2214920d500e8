"""Which object of ours an object belongs to: its controller owner reference, never a label. Pure.

Anybody who may create pods can copy a label, and a job's uid is public. A worker pod is a pod in the
job's namespace whose controller is this job, by uid and kind, and whose name is one that the job gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_core.api import GROUP, CheckpointStore, TrainingJob
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.names import parse_pod_name
from holdfast_operator.model.job import Owner

PROBE_PREFIX = "holdfast-probe-"
"""Names of store probes begin so."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a pod's immutable metadata say: whose worker it is, and born in which round."""

    job: str
    job_uid: JobUid
    worker: Worker
    birth_round: RestartRound


def controller_of(raw: Mapping[str, Any]) -> Owner | None:
    """The controller of an object, if it is of one of our kinds; None for all others."""
    references = (raw.get("metadata") or {}).get("ownerReferences")
    for reference in references if isinstance(references, list) else []:
        if not isinstance(reference, Mapping) or reference.get("controller") is not True:
            continue
        if str(reference.get("apiVersion")).partition("/")[0] != GROUP:
            return None  # an object has one controller at most
        return Owner(
            kind=str(reference.get("kind")),
            name=str(reference.get("name")),
            uid=str(reference.get("uid")),
        )
    return None


def worker_identity(raw: Mapping[str, Any]) -> WorkerIdentity | None:
    """None: the pod is no worker of any job, whatever its labels say."""
    owner = controller_of(raw)
    if owner is None or owner.kind != TrainingJob.KIND:
        return None
    uid = JobUid(owner.uid)
    found = parse_pod_name(owner.name, uid, str(raw["metadata"].get("name")))
    if found is None:
        return None
    return WorkerIdentity(owner.name, uid, *found)


def probed_store(raw: Mapping[str, Any]) -> Owner | None:
    """The CheckpointStore that a probe pod was made for; None: the pod is no probe."""
    owner = controller_of(raw)
    if owner is None or owner.kind != CheckpointStore.KIND:
        return None
    return owner if str(raw["metadata"].get("name")).startswith(PROBE_PREFIX) else None


def whose(raw: Mapping[str, Any]) -> str:
    """For messages: the controller of an object, in words."""
    references = (raw.get("metadata") or {}).get("ownerReferences") or []
    for reference in references:
        if isinstance(reference, Mapping) and reference.get("controller") is True:
            return (
                f"{reference.get('kind')} {reference.get('name')} (uid {reference.get('uid')}) "
                "controls it"
            )
    return "no controller owns it"
