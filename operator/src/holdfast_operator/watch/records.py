"""The records that the reflectors keep of pods, nodes and leases: frozen, compared by value. Pure.

An event that leaves the record equal is ignored. Objects of our own kinds are kept as core.api parses them.

Parsing raises pydantic.ValidationError, KeyError or ValueError for an object that the API server should have
refused, or that holds a value that only a newer release can parse. The reflector then keeps it as an
Unreadable. Such an object must not count as deleted, because the operator would then delete what belongs to
it (ADR 0002).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from holdfast_core.clock import parse_stamp
from holdfast_core.contract import CERTS_VOLUME, SIDECAR_CONTAINER, TRAINER_CONTAINER, StoreVerb
from holdfast_core.ids import JobUid
from holdfast_operator.model import labels
from holdfast_operator.model.command_pods import CommandView
from holdfast_operator.model.job import (
    LOST_NODE_TAINTS,
    NodeView,
    Owner,
    PodGroup,
    PodPhase,
    PodView,
    RawSource,
    Taint,
    Unreadable,
    tolerated_taints,
)
from holdfast_operator.model.ownership import (
    Key,
    WorkerIdentity,
    adopted_identity,
    adoption_key,
    any_controller,
    command_of,
    controller_of,
    job_key,
    store_key,
    whose,
    worker_identity,
)
from holdfast_operator.model.template import from_annotation

MAX_VALUE_CHARACTERS = 80
MAX_PROBLEM_CHARACTERS = 500


def unreadable(kind: str, raw: Mapping[str, Any], error: Exception) -> Unreadable:
    """Return the record of an object whose parser raised `error`."""
    meta = raw["metadata"]
    its_labels = meta.get("labels")
    job = its_labels.get(labels.JOB_NAME) if isinstance(its_labels, Mapping) else None
    return Unreadable(
        kind=kind,
        namespace=str(meta.get("namespace") or ""),
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        problem=problem_of(error),
        owner=controller_of(raw),
        job=None if job is None else str(job),
        source=_source(raw, str(meta.get("namespace") or "")),
    )


def _source(raw: Mapping[str, Any], own: str) -> RawSource | None:
    spec = raw.get("spec")
    given = spec.get("restoreFrom") if isinstance(spec, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    checkpoint, job = (
        ref if isinstance(ref := given.get(key), Mapping) else {}
        for key in ("checkpointRef", "jobRef")
    )
    names = (str(ref.get("name") or "") for ref in (checkpoint, job))
    return RawSource(str(checkpoint.get("namespace") or own), *names)


def problem_of(error: Exception) -> str:
    """Describe the first field that could not be parsed: what was expected and what was found."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]
    first, *others = error.errors(include_url=False)
    field = ".".join(str(part) for part in first["loc"]) or "the object"
    found = repr(first.get("input"))
    if len(found) > MAX_VALUE_CHARACTERS:
        found = f"{found[:MAX_VALUE_CHARACTERS]}..."
    text = f"{field}: {first['msg']}, found {found}"
    if others:
        text = f"{text} (and {len(others)} more fields)"
    return text[:MAX_PROBLEM_CHARACTERS]


_ANNOUNCED = ("DisruptionTarget", "TerminationTarget")
"""Conditions that announce the deletion of a pod: Kubernetes' own, and that of Kueue when it preempts."""


def _group(meta: Mapping[str, Any]) -> PodGroup | None:
    """Return the pod group that the labels name, or None. An unusable count is 0, which no group has."""
    pod_labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    name = pod_labels.get(labels.POD_GROUP)
    if not name:
        return None
    count = str(notes.get(labels.POD_GROUP_COUNT))
    return PodGroup(
        name=str(name),
        queue=str(pod_labels.get(labels.QUEUE_NAME) or ""),
        pods=int(count) if count.isdecimal() else 0,
        priority_class=pod_labels.get(labels.QUEUE_PRIORITY) or None,
    )


def _never_started(trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return reason and message of a container whose command cannot be started, else an empty mapping.

    An image without the launcher is an example. The kubelet then alternates StartError, RunContainerError
    and CrashLoopBackOff and counts restarts, which alone would look like a trainer that crashes.
    """
    state = trainer.get("state") or {}
    if state.get("running"):
        return {}
    for ended in (state.get("terminated"), (trainer.get("lastState") or {}).get("terminated")):
        if ended and ended.get("reason") == "StartError":
            return {"reason": "StartError", "message": ended.get("message")}
    return {}


def pod_view(raw: Mapping[str, Any], identity: WorkerIdentity) -> PodView:
    """Return the view of a worker pod.

    Args:
        identity: Worker and birth round from the pod's name and controller. Labels are not used, because
            they can be changed.
    """
    meta = raw.get("metadata") or {}
    status = raw.get("status") or {}
    trainer = _container(status.get("containerStatuses"), TRAINER_CONTAINER)
    sidecar = _container(status.get("initContainerStatuses"), SIDECAR_CONTAINER)
    waiting = _never_started(trainer) or _first_waiting(status)
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    reason, message = _text(status, trainer, conditions)
    ended = (trainer.get("state") or {}).get("terminated") or {}
    return PodView(
        name=str(meta.get("name")),
        uid=str(meta.get("uid")),
        worker=identity.worker,
        birth_round=identity.birth_round,
        phase=PodPhase(status.get("phase") or "Pending"),
        ip=status.get("podIP") or None,
        node=(raw.get("spec") or {}).get("nodeName") or None,
        terminating=meta.get("deletionTimestamp") is not None,
        grace_seconds=_grace_seconds(raw),
        ready=_is_true(conditions.get("Ready")),
        trainer_exit_code=ended.get("exitCode"),
        trainer_finished_at=_finished_at(trainer),
        trainer_restarts=int(trainer.get("restartCount") or 0),
        memory_limit=_memory_limit(raw.get("spec") or {}),
        waiting_reason=waiting.get("reason"),
        waiting_message=str(waiting.get("message") or ""),
        sidecar_started=bool(sidecar.get("started")),
        sidecar_restarts=int(sidecar.get("restartCount") or 0),
        reason=reason,
        message=message,
        disrupted=any(_is_true(conditions.get(kind)) for kind in _ANNOUNCED),
        conditions=_pairs(tuple((str(k), str(c.get("status"))) for k, c in conditions.items())),
        avoided_nodes=_nodes(meta, labels.AVOIDED_NODES),
        failed_nodes=_nodes(meta, labels.FAILED_NODES),
        tolerated=tolerated_taints(raw.get("spec") or {}),
        tolerations=_pairs(_tolerations(raw.get("spec") or {})),
        identity=identity.identity,
        controller=any_controller(raw) if identity.identity else None,
        placeholder=identity.placeholder,
        rendered_from=_pairs(from_annotation(_note(meta, labels.RENDERED_FROM))),
        trainer_ran=_ran(trainer),
        certificates=_certificates(raw.get("spec") or {}),
        created=str(meta.get("creationTimestamp") or ""),
        group=_group(meta),
        queued=any(
            str(gate.get("name")).startswith(labels.KUEUE_GATE_PREFIX)
            for gate in (raw.get("spec") or {}).get("schedulingGates") or []
        ),
        has_kueue_finalizer=labels.KUEUE_FINALIZER in (meta.get("finalizers") or []),
    )


@lru_cache(maxsize=1024)
def _pairs(pairs: tuple[tuple[str, str], ...]) -> frozenset[tuple[str, str]]:
    """Return the pairs as a set that all objects with the same ones share: there may be 100,000 pods."""
    return frozenset(pairs)


def _tolerations(spec: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    found = spec.get("tolerations") or []
    return tuple((str(t.get("key") or ""), str(t.get("effect") or "")) for t in found)


def _grace_seconds(raw: Mapping[str, Any]) -> float:
    deletion = (raw.get("metadata") or {}).get("deletionGracePeriodSeconds")
    spec = (raw.get("spec") or {}).get("terminationGracePeriodSeconds")
    return float(next((s for s in (deletion, spec) if s is not None), 30))


def _memory_limit(spec: Mapping[str, Any]) -> str | None:
    trainer = _container(spec.get("containers"), TRAINER_CONTAINER)
    limit = ((trainer.get("resources") or {}).get("limits") or {}).get("memory")
    return None if limit is None else str(limit)


def _certificates(spec: Mapping[str, Any]) -> str:
    volumes = spec.get("volumes") or []
    found: Mapping[str, Any] = next((v for v in volumes if v.get("name") == CERTS_VOLUME), {})
    return str((found.get("secret") or {}).get("secretName") or "")


def _nodes(meta: Mapping[str, Any], annotation: str) -> frozenset[str]:
    return frozenset(filter(None, _note(meta, annotation).split(",")))


def _note(meta: Mapping[str, Any], annotation: str) -> str:
    return str((meta.get("annotations") or {}).get(annotation) or "")


def _ran(container: Mapping[str, Any]) -> bool:
    """Return whether a process of the container was ever started."""
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ended = [e for e in (state.get("terminated"), last.get("terminated")) if e]
    if not ended and container.get("restartCount"):
        return True  # the kubelet has forgotten how it ended
    return bool(state.get("running")) or any(e.get("reason") != "StartError" for e in ended)


def _container(statuses: Any, name: str) -> Mapping[str, Any]:
    return next((s for s in statuses or [] if s.get("name") == name), {})


def _finished_at(container: Mapping[str, Any]) -> datetime | None:
    """Return when the container last ended, or None if it has not ended or the time is missing."""
    for key in ("state", "lastState"):
        ended = (container.get(key) or {}).get("terminated") or {}
        if ended.get("finishedAt"):
            return parse_stamp(str(ended["finishedAt"]))
    return None


def _first_waiting(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the waiting state of the first container that waits for another reason than a normal start.

    Init containers come first. The mapping is empty if there is none.
    """
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
                return dict(waiting)
    return {}


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _text(
    status: Mapping[str, Any], trainer: Mapping[str, Any], conditions: Mapping[Any, Any]
) -> tuple[str | None, str]:
    """Return the most specific reason and message of a pod that is not well, or (None, "")."""
    if status.get("reason"):
        return str(status["reason"]), str(status.get("message") or "")
    for kind in _ANNOUNCED:
        disruption = conditions.get(kind)
        if disruption is not None and _is_true(disruption):
            return str(disruption.get("reason")), str(disruption.get("message") or "")
    for key in ("state", "lastState"):
        ended = (trainer.get(key) or {}).get("terminated") or {}
        if ended.get("reason") not in (None, "Completed"):
            text = f"trainer ended with code {ended.get('exitCode')}"
            return str(ended["reason"]), str(ended.get("message") or text)
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.get("status") == "False":
        return str(scheduled.get("reason")), str(scheduled.get("message") or "")
    return None, ""


def node_view(raw: Mapping[str, Any]) -> NodeView:
    meta = raw.get("metadata") or {}
    taints = (raw.get("spec") or {}).get("taints") or []
    found = {Taint(str(t.get("key")), str(t.get("effect"))) for t in taints}
    # The scheduler may place a new pod on a node with PreferNoSchedule: it says nothing certain.
    other = {t for t in found - LOST_NODE_TAINTS if t.effect != "PreferNoSchedule"}
    return NodeView(
        name=str(meta.get("name")),
        taints=frozenset(found & LOST_NODE_TAINTS),
        other_taints=frozenset(other),
        conditions=_pairs(
            tuple(
                (str(c.get("type")), str(c.get("status")))
                for c in (raw.get("status") or {}).get("conditions") or []
            )
        ),
        labels=dict(meta.get("labels") or {}),
    )


@dataclass(frozen=True, slots=True)
class ManagedPod:
    """A pod with our label: a WorkerPod, a CommandPod, or a ForeignPod."""

    namespace: str
    uid: str


@dataclass(frozen=True, slots=True)
class ForeignPod(ManagedPod):
    """A pod with our label, but without the controller and name of a worker or of a store's command.

    It is never counted as one of them, called or deleted.
    """

    name: str
    whose: str


@dataclass(frozen=True, slots=True)
class WorkerPod(ManagedPod):
    """The pod of a worker, or a placeholder of a missing one."""

    key: Key
    """Key of the job or adoption to which it belongs."""
    job_uid: JobUid
    view: PodView


@dataclass(frozen=True, slots=True)
class CommandPod(ManagedPod):
    """A short-lived pod that runs a command with the keys of a store."""

    store: Owner
    verb: StoreVerb
    view: CommandView

    @property
    def key(self) -> Key:
        """The pass that reads the result."""
        return store_key(self.namespace, self.store.name)


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
    identity = worker_identity(raw)
    if identity is not None:
        return _worker_pod(raw, identity, job_key(namespace, identity.job))
    command = command_of(raw)
    if command is None:
        return ForeignPod(namespace, str(meta["uid"]), str(meta["name"]), whose(raw))
    return CommandPod(namespace, str(meta["uid"]), *command, _command_view(raw))


def read_adopted_pod(raw: Mapping[str, Any]) -> ManagedPod | None:
    """Return the record of a pod with the label of a CheckpointAdoption, or None if it has no sidecar."""
    identity, namespace = adopted_identity(raw), str(raw["metadata"].get("namespace"))
    if identity is None:
        return None
    return _worker_pod(raw, identity, adoption_key(namespace, identity.job))


def _worker_pod(raw: Mapping[str, Any], identity: WorkerIdentity, key: Key) -> WorkerPod:
    view = pod_view(raw, identity)
    return WorkerPod(key.namespace, view.uid, key, identity.job_uid, view)


def _command_view(raw: Mapping[str, Any]) -> CommandView:
    meta, status = raw["metadata"], raw.get("status") or {}
    state = ((status.get("containerStatuses") or [{}])[0]).get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated")
    scheduled: Mapping[str, Any] = next(
        (c for c in status.get("conditions") or [] if c.get("type") == "PodScheduled"), {}
    )
    unscheduled = scheduled.get("status") == "False"
    message = None
    if ended is not None or status.get("phase") in ("Failed", "Succeeded"):
        # A program that was killed has written nothing. The pod says why where the kubelet has ended it.
        how = ended or {}
        code = how.get("exitCode")
        killed = f"{how.get('reason')}, exit code {code}" if code else ""
        message = str(how.get("message") or status.get("message") or killed)
    return CommandView(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
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
