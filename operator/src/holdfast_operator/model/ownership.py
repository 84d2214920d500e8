"""Which object an object belongs to, where pods come from, and the keys of the work queue. Pure.

Labels do not prove ownership: any user who may create pods can copy a label, and a job's uid is public
(ADR 0002). A pod is a worker of a job if it is in the job's namespace, its controller reference has the
job's kind and uid, and its name is one that the operator gives to a worker of that job.

A key of the work queue identifies one object and holds none of its content.

The operator creates the pods of a gang, or another controller does (ADR 0015). The rules of `decide` are the
same for both. They ask a `PodSource` for names, for the evidence that a pod has
started, and for the actions that the operator may take on pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from holdfast_core.api import (
    GROUP,
    AdoptedPod,
    Checkpoint,
    CheckpointAdoption,
    CheckpointAdoptionStatus,
    CheckpointStore,
    Gang,
    TrainingJob,
    TrainingJobStatus,
    changed,
)
from holdfast_core.contract import SIDECAR_CONTAINER, StoreVerb
from holdfast_core.ids import JobUid, RestartRound, Worker
from holdfast_core.names import (
    CERTIFICATES_IN_SECRET,
    certificates_secret_name,
    job_prefix,
    parse_placeholder_name,
    parse_pod_name,
    pod_name,
    worker_name,
)
from holdfast_operator.model import labels
from holdfast_operator.model.job import Owner, PodView, Unreadable


def command_prefix(verb: StoreVerb) -> str:
    """Return the beginning of the names of the pods that do this."""
    return f"holdfast-{verb}-"


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


def any_controller(raw: Mapping[str, Any]) -> Owner | None:
    """Return the controller of an object, of which it has one at most, or None."""
    references = (raw.get("metadata") or {}).get("ownerReferences")
    for reference in references if isinstance(references, list) else []:
        if isinstance(reference, Mapping) and reference.get("controller") is True:
            return Owner(
                kind=str(reference.get("kind")),
                name=str(reference.get("name")),
                uid=str(reference.get("uid")),
                group=str(reference.get("apiVersion")).partition("/")[0],
            )
    return None


def controller_of(raw: Mapping[str, Any]) -> Owner | None:
    """Return the controller of an object if its kind is in our API group, else None."""
    found = any_controller(raw)
    return found if found is not None and found.group == GROUP else None


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


def command_of(raw: Mapping[str, Any]) -> tuple[Owner, StoreVerb] | None:
    """Return the store and the verb of a pod that runs a command for it, or None for any other pod."""
    owner, name = controller_of(raw), str(raw["metadata"].get("name"))
    if owner is None or owner.kind != CheckpointStore.KIND:
        return None
    verb = next((v for v in StoreVerb if name.startswith(command_prefix(v))), None)
    return None if verb is None else (owner, verb)


def whose(raw: Mapping[str, Any]) -> str:
    """Describe the controller of an object, for messages."""
    owner = any_controller(raw)
    if owner is None:
        return "it has no controller"
    return f"{owner.kind} {owner.name} (uid {owner.uid}) controls it"


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


def log_fields(gang: Gang) -> dict[str, Any]:
    """Return the fields of a log line about a job."""
    return {"namespace": gang.namespace, "job": gang.name, "round": gang.status.restart_round}


def store_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.STORE, namespace, name)


# --------------------------------------------------------------------------- where pods come from


def certificates_prefix(job: CheckpointAdoption) -> str:
    """Return the prefix of the names of Secrets with certificates of adopted pods.

    The number of the block of workers follows it. The admission policy makes the same name. The uid keeps
    apart adoptions of one name: an orphaning delete leaves the Secrets of the former one.
    """
    return f"{job_prefix(job.name, job.uid)}-holdfast-certs-"


@dataclass(frozen=True)
class OwnPods:
    """Pods that the operator creates and deletes. Their names tell worker and birth round.

    A pod that was a spare keeps its name. The status records which worker it is, and since which round.
    """

    job: TrainingJob

    @cached_property
    def _promoted(self) -> dict[tuple[Worker, RestartRound], str]:
        """The names of the pods that were spares, by worker and birth round."""
        spares, members = self.job.status.spares, self.job.status.members
        promoted = () if spares is None else spares.promoted
        return {(r.worker, members[r.worker]): r.pod for r in promoted if r.worker < len(members)}

    def members(self, pods: tuple[PodView, ...], lost_nodes: frozenset[str]) -> tuple[PodView, ...]:
        """Return the pods that the passes over the gang see, each with its birth round."""
        if not self._promoted:
            return pods
        by_name = {name: key for key, name in self._promoted.items()}
        return tuple(_as(pod, by_name.get(pod.name)) for pod in pods)

    def identity(self, worker: Worker, birth: RestartRound) -> str:
        """Return the name of a worker's pod in ROUND messages and certificates."""
        known = self._promoted.get((worker, birth))
        return known or pod_name(self.job.name, self.job.uid, worker, birth)

    def gone_name(self, worker: Worker, birth: RestartRound) -> str | None:
        """Return the name of the pod whose absence a direct read can confirm, or None."""
        return self.identity(worker, birth)

    def sealed_from(self, worker: Worker, birth: RestartRound) -> RestartRound:
        """Return the round for which the sidecar of the worker's pod is sealed when it starts."""
        return self._born_as(worker, birth)[1]

    def was_spare(self, worker: Worker, birth: RestartRound) -> bool:
        """Return whether the worker's pod of this birth round was a spare before (ADR 0015)."""
        return (worker, birth) in self._promoted

    def has_started(self, worker: Worker, birth: RestartRound) -> bool | None:
        """Return whether the status records a start of the worker's pod. None: it has no such records."""
        return True if self.was_spare(worker, birth) else None

    def _born_as(self, worker: Worker, birth: RestartRound) -> tuple[Worker, RestartRound]:
        """Return the index and the round with which the worker's pod was created."""
        name = self._promoted.get((worker, birth))
        born = None if name is None else parse_pod_name(self.job.name, self.job.uid, name)
        return born or (worker, birth)

    def certificates(self, worker: Worker, birth: RestartRound) -> str:
        """Return the name of the Secret with the certificate of the worker's pod of this birth round."""
        worker, birth = self._born_as(worker, birth)
        return certificates_secret_name(self.job.name, self.job.uid, worker, birth)

    def with_births(
        self, status: TrainingJobStatus, pods: tuple[PodView, ...]
    ) -> TrainingJobStatus:
        """Return the status with a record of every pod that has started."""
        return status

    def may_put(self, kind: str) -> bool:
        """Return whether the operator creates objects of this kind, or the controller of the pods does."""
        return True

    def may_delete(self, kind: str) -> bool:
        """Return whether the operator deletes objects of this kind, and releases them."""
        return True


def _as(pod: PodView, became: tuple[Worker, RestartRound] | None) -> PodView:
    """Return the pod as the worker that it has become, or as it is."""
    return pod if became is None else replace(pod, worker=became[0], birth_round=became[1])


@dataclass(frozen=True, slots=True)
class AdoptedPods:
    """Pods of another controller. The status records the uid of each that has started, as its birth.

    1. A pod that the status does not name has held nothing of the gang: it is new.
    2. A recorded pod that is gone has failed. The next round gives its worker a new birth round, and the
       first pod that starts afterwards is recorded for it.
    3. A new sidecar cannot know its birth round at admission, so it starts sealed for round 0 and gets a SEAL
       like a survivor.
    """

    job: CheckpointAdoption

    def members(self, pods: tuple[PodView, ...], lost_nodes: frozenset[str]) -> tuple[PodView, ...]:
        chosen: list[PodView] = []
        by_worker: dict[Worker, list[PodView]] = {}
        for pod in pods:
            by_worker.setdefault(pod.worker, []).append(pod)
        status = self.job.status
        for index, birth in enumerate(status.members):
            uid = status.recorded(Worker(index), birth)
            claims = by_worker.get(Worker(index), [])
            if uid is not None:
                claims = [p for p in claims if p.uid == uid]
            else:
                claims = [p for p in claims if p.alive and p.node not in lost_nodes]
            if claims:
                newest = max(claims, key=lambda p: (p.created, p.name))
                # Restarts of a container count against a pod that the operator can replace.
                chosen.append(replace(newest, birth_round=birth, trainer_restarts=0))
        return tuple(chosen)

    def identity(self, worker: Worker, birth: RestartRound) -> str:
        return worker_name(worker)

    def gone_name(self, worker: Worker, birth: RestartRound) -> str | None:
        return None

    def sealed_from(self, worker: Worker, birth: RestartRound) -> RestartRound:
        return RestartRound(0)

    def was_spare(self, worker: Worker, birth: RestartRound) -> bool:
        return False

    def has_started(self, worker: Worker, birth: RestartRound) -> bool | None:
        return self.job.status.recorded(worker, birth) is not None

    def certificates(self, worker: Worker, birth: RestartRound) -> str:
        return f"{certificates_prefix(self.job)}{worker // CERTIFICATES_IN_SECRET}"

    def with_births(
        self, status: TrainingJobStatus, pods: tuple[PodView, ...]
    ) -> TrainingJobStatus:
        if not isinstance(status, CheckpointAdoptionStatus):
            return status
        records = {
            p.worker: p
            for p in status.pods
            if p.worker < len(status.members) and status.members[p.worker] == p.birth
        }
        for pod in pods:
            if pod.started and pod.worker not in records:
                record = AdoptedPod(worker=pod.worker, uid=pod.uid, birth=pod.birth_round)
                records[pod.worker] = record
        if all(r in status.pods for r in records.values()):
            return status
        return changed(status, pods=tuple(records[w] for w in sorted(records)))

    def may_put(self, kind: str) -> bool:
        return kind in (labels.SECRET, Checkpoint.KIND)

    def may_delete(self, kind: str) -> bool:
        return kind not in (labels.POD, labels.SECRET)


PodSource = OwnPods | AdoptedPods


def pod_source(gang: Gang) -> PodSource:
    return AdoptedPods(gang) if isinstance(gang, CheckpointAdoption) else OwnPods(gang)
