"""Convert the JSON of pods and nodes to views. Pure.

Parsing raises pydantic.ValidationError, KeyError or ValueError for an object that the API server should have
refused. The reflector then keeps it as an Unreadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from holdfast_core.clock import parse_stamp
from holdfast_core.contract import SIDECAR_CONTAINER, TRAINER_CONTAINER
from holdfast_operator.model import labels
from holdfast_operator.model.job import (
    LOST_NODE_TAINTS,
    NodeView,
    PodPhase,
    PodView,
    Taint,
    tolerated_taints,
)
from holdfast_operator.model.ownership import WorkerIdentity


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
    avoided = str((meta.get("annotations") or {}).get(labels.AVOIDED_NODES) or "")
    return PodView(
        name=str(meta.get("name")),
        uid=str(meta.get("uid")),
        worker=identity.worker,
        birth_round=identity.birth_round,
        phase=PodPhase(status.get("phase") or "Pending"),
        ip=status.get("podIP") or None,
        node=(raw.get("spec") or {}).get("nodeName") or None,
        terminating=meta.get("deletionTimestamp") is not None,
        ready=_is_true(conditions.get("Ready")),
        trainer_exit_code=ended.get("exitCode"),
        trainer_finished_at=_finished_at(trainer),
        trainer_restarts=int(trainer.get("restartCount") or 0),
        waiting_reason=waiting.get("reason"),
        waiting_message=str(waiting.get("message") or ""),
        sidecar_started=bool(sidecar.get("started")),
        sidecar_restarts=int(sidecar.get("restartCount") or 0),
        reason=reason,
        message=message,
        disrupted=_is_true(conditions.get("DisruptionTarget")),
        avoided_nodes=frozenset(filter(None, avoided.split(","))),
        tolerated=tolerated_taints(raw.get("spec") or {}),
    )


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
    disruption = conditions.get("DisruptionTarget")
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
    return NodeView(
        name=str(meta.get("name")),
        taints=frozenset(found & LOST_NODE_TAINTS),
        labels=dict(meta.get("labels") or {}),
    )
