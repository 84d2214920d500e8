"""Convert the API's JSON to views, and a job's status back to JSON. Pure.

Parsing raises pydantic.ValidationError, ConfigError or ValueError for an object that the CRD should have
refused; the reflector then keeps it as an Unreadable. Fields that a newer version added are ignored when
an object is read. A status write keeps them, because it is a merge patch with this version's fields only;
lists are replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    ConditionStatus,
    TrainingJob,
    TrainingJobSpec,
    TrainingJobStatus,
    parse_duration,
    parse_quantity_bytes,
)
from holdfast_core.api import condition as find_condition
from holdfast_core.clock import stamp
from holdfast_core.contract import SIDECAR_CONTAINER, TRAINER_CONTAINER
from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound
from holdfast_operator.model import labels
from holdfast_operator.model.job import (
    CheckpointView,
    Condition,
    ExitCodeRule,
    GoodputView,
    JobSpecView,
    JobStatusView,
    JobView,
    LineageEntry,
    NodeView,
    PersistedView,
    PodPhase,
    PodView,
    RecoveryView,
    RestartRecord,
    RestorePointView,
    Sources,
    Taint,
)
from holdfast_operator.model.ownership import WorkerIdentity

_CONDITION_VALUES = {
    ConditionStatus.TRUE: True,
    ConditionStatus.FALSE: False,
    ConditionStatus.UNKNOWN: None,
}
_CONDITION_WORDS = {True: "True", False: "False", None: "Unknown"}


def parse_stamp(text: str) -> datetime:
    """Return an RFC 3339 time stamp as an aware datetime in UTC. Raises ConfigError."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise ConfigError(f"time stamp {text!r} is not RFC 3339: {error}") from error
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _stamp_or_none(text: str | None) -> datetime | None:
    return None if text is None else parse_stamp(text)


# --------------------------------------------------------------------------- TrainingJob


def job_view(raw: Mapping[str, Any]) -> JobView:
    job = TrainingJob.from_dict(raw)
    meta = job.metadata
    return JobView(
        namespace=meta.namespace or "",
        name=meta.name,
        uid=JobUid(meta.uid or ""),
        resource_version=meta.resource_version or "",
        generation=meta.generation or 0,
        spec=_spec_view(job.spec),
        status=status_view(job.status),
        created_at=parse_stamp(meta.creation_timestamp or "1970-01-01T00:00:00Z"),
        deleting=meta.deletion_timestamp is not None,
    )


def _spec_view(spec: TrainingJobSpec) -> JobSpecView:
    checkpoint = spec.checkpoint
    peer, object_ = checkpoint.peer, checkpoint.object
    memory_limit = checkpoint.memory.size_limit
    policy = spec.failure_policy
    deadline, ttl = spec.active_deadline_seconds, spec.ttl_seconds_after_finished
    view = JobSpecView(
        workers=spec.workers,
        procs_per_worker=spec.procs_per_worker,
        template=spec.template,
        interval_steps=checkpoint.interval.steps,
        slots=checkpoint.memory.slots,
        shared_memory_bytes=None if memory_limit is None else parse_quantity_bytes(memory_limit),
        node_size_limit_bytes=parse_quantity_bytes(checkpoint.node.volume.empty_dir.size_limit),
        peer_copies=spec.peer_copies,
        store=None if object_ is None else object_.store_ref.name,
        object_every_steps=None if object_ is None else object_.every.steps,
        object_compression="None" if object_ is None else object_.compression.value,
        keep_last=checkpoint.retention.keep_last,
        restore_from=None if spec.restore_from is None else spec.restore_from.checkpoint_ref.name,
        max_restarts=policy.max_restarts,
        restart_window=parse_duration(policy.window),
        rules=tuple(ExitCodeRule(r.on_exit_codes) for r in policy.rules),
        suspect_after=timedelta(seconds=spec.node_loss.suspect_after_seconds),
        suspend=spec.suspend,
        active_deadline=None if deadline is None else timedelta(seconds=deadline),
        ttl_after_finished=None if ttl is None else timedelta(seconds=ttl),
        **(
            {}
            if peer is None
            else {"topology_key": peer.topology_key, "peer_encryption": peer.encryption.value}
        ),
    )
    return view


def status_view(status: TrainingJobStatus) -> JobStatusView:
    point, last, recovery = status.restore_point, status.last_persisted, status.last_recovery
    return JobStatusView(
        restart_round=status.restart_round,
        members=status.members,
        coordinator=status.coordinator,
        restore_point=None
        if point is None
        else RestorePointView(
            step=point.step,
            round=point.round,
            manifest=point.manifest,
            sources=Sources()
            if point.sources is None
            else Sources(
                point.sources.memory, point.sources.node, point.sources.peer, point.sources.object
            ),
            job_uid=point.job_uid,
            job_namespace=point.job_namespace,
        ),
        lineage=tuple(
            LineageEntry(e.round, e.base_step, e.base_round, e.base_manifest)
            for e in status.lineage
        ),
        last_persisted=None
        if last is None
        else PersistedView(last.step, last.round, last.manifest),
        step=status.step,
        last_committed_step=status.last_committed_step,
        last_replicated_step=status.last_replicated_step,
        last_memory_step=status.last_memory_step,
        steps_dropped=status.steps_dropped,
        restarts=status.restarts,
        restarts_count_towards_max=status.restarts_count_towards_max,
        recent_restarts=tuple(
            RestartRecord(
                r.round,
                parse_stamp(r.at),
                r.reason,
                None
                if r.failed_step is None or r.failed_round is None
                else CheckpointId(r.failed_step, r.failed_round),
            )
            for r in status.recent_restarts
        ),
        last_recovery=None
        if recovery is None
        else RecoveryView(
            round=RestartRound(0) if recovery.round is None else recovery.round,
            reason=recovery.reason,
            begun_at=_stamp_or_none(recovery.begun_at),
            detect_seconds=recovery.detect_seconds,
            back_off_seconds=recovery.back_off_seconds,
            seal_seconds=recovery.seal_seconds,
            schedule_seconds=recovery.schedule_seconds,
            rehydrate_seconds=recovery.rehydrate_seconds,
            rendezvous_seconds=recovery.rendezvous_seconds,
            first_step_seconds=recovery.first_step_seconds,
            total_seconds=recovery.total_seconds,
            lost_steps=recovery.lost_steps,
        ),
        goodput=None
        if status.goodput is None
        else GoodputView(
            status.goodput.ratio,
            status.goodput.training_seconds,
            status.goodput.checkpoint_seconds,
            status.goodput.recovery_seconds,
            status.goodput.lost_work_seconds,
        ),
        workers_ready=0 if status.workers is None else status.workers.ready,
        workers_total=0 if status.workers is None else status.workers.total,
        start_time=_stamp_or_none(status.start_time),
        completion_time=_stamp_or_none(status.completion_time),
        conditions=tuple(
            Condition(
                type=c.type,
                status=_CONDITION_VALUES[c.status],
                reason=c.reason,
                message=c.message,
                last_transition=parse_stamp(c.last_transition_time),
                observed_generation=c.observed_generation or 0,
            )
            for c in status.conditions
        ),
        phase="" if status.phase is None else status.phase,
        observed_generation=status.observed_generation or 0,
    )


def status_to_dict(status: JobStatusView) -> dict[str, Any]:
    """Return the JSON merge patch of `.status`. A field that is None here is null, which removes it."""
    point, last, recovery, goodput = (
        status.restore_point,
        status.last_persisted,
        status.last_recovery,
        status.goodput,
    )
    return {
        "phase": status.phase or None,
        "restartRound": status.restart_round,
        "restarts": status.restarts,
        "restartsCountTowardsMax": status.restarts_count_towards_max,
        "recentRestarts": [
            {
                "round": r.round,
                "at": stamp(r.at),
                "reason": r.reason,
                **(
                    {}
                    if r.failed_from is None
                    else {"failedStep": r.failed_from.step, "failedRound": r.failed_from.round}
                ),
            }
            for r in status.recent_restarts
        ],
        "step": status.step,
        "lastCommittedStep": status.last_committed_step,
        "lastReplicatedStep": status.last_replicated_step,
        "lastMemoryStep": status.last_memory_step,
        "stepsDropped": status.steps_dropped,
        "lastPersisted": None
        if last is None
        else {"step": last.step, "round": last.round, "manifest": last.manifest},
        "members": list(status.members),
        "coordinator": status.coordinator,
        "restorePoint": None
        if point is None
        else {
            "step": point.step,
            "round": point.round,
            "manifest": point.manifest,
            "jobUid": point.job_uid,
            "jobNamespace": point.job_namespace,
            "sources": {
                "memory": point.sources.memory,
                "node": point.sources.node,
                "peer": point.sources.peer,
                "object": point.sources.object,
            },
        },
        "lineage": [_without_none(_lineage_dict(e)) for e in status.lineage],
        "lastRecovery": None
        if recovery is None
        else {
            "round": recovery.round,
            "reason": recovery.reason,
            "begunAt": None if recovery.begun_at is None else stamp(recovery.begun_at),
            "detectSeconds": recovery.detect_seconds,
            "backOffSeconds": recovery.back_off_seconds,
            "sealSeconds": recovery.seal_seconds,
            "scheduleSeconds": recovery.schedule_seconds,
            "rehydrateSeconds": recovery.rehydrate_seconds,
            "rendezvousSeconds": recovery.rendezvous_seconds,
            "firstStepSeconds": recovery.first_step_seconds,
            "totalSeconds": recovery.total_seconds,
            "lostSteps": recovery.lost_steps,
        },
        "goodput": None
        if goodput is None
        else {
            "ratio": round(goodput.ratio, 4),
            "trainingSeconds": round(goodput.training_seconds, 3),
            "checkpointSeconds": round(goodput.checkpoint_seconds, 3),
            "recoverySeconds": round(goodput.recovery_seconds, 3),
            "lostWorkSeconds": round(goodput.lost_work_seconds, 3),
        },
        "workers": {
            "ready": status.workers_ready,
            "total": status.workers_total,
            "summary": f"{status.workers_ready}/{status.workers_total}",
        },
        "startTime": None if status.start_time is None else stamp(status.start_time),
        "completionTime": None if status.completion_time is None else stamp(status.completion_time),
        "conditions": [
            {
                "type": c.type,
                "status": _CONDITION_WORDS[c.status],
                "reason": c.reason,
                "message": c.message,
                "lastTransitionTime": stamp(c.last_transition),
                "observedGeneration": c.observed_generation,
            }
            for c in status.conditions
        ],
        "observedGeneration": status.observed_generation,
    }


def _lineage_dict(entry: LineageEntry) -> dict[str, Any]:
    return {
        "round": entry.round,
        "baseStep": entry.base_step,
        "baseRound": entry.base_round,
        "baseManifest": entry.base_manifest,
    }


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    """Remove None values, because a merge patch would keep nulls that are inside a list."""
    return {k: v for k, v in values.items() if v is not None}


# --------------------------------------------------------------------------- Checkpoint


def checkpoint_view(raw: Mapping[str, Any]) -> CheckpointView:
    checkpoint = Checkpoint.from_dict(raw)
    meta, spec, status = checkpoint.metadata, checkpoint.spec, checkpoint.status

    def holds(kind: CheckpointCondition) -> bool:
        found = find_condition(status.conditions, kind)
        return found is not None and found.status is ConditionStatus.TRUE

    return CheckpointView(
        name=meta.name,
        uid=meta.uid or "",
        resource_version=meta.resource_version or "",
        job=spec.job_ref.name,
        created_at=parse_stamp(meta.creation_timestamp or "1970-01-01T00:00:00Z"),
        step=spec.step,
        round=status.round,
        manifest=status.manifest,
        job_uid=status.job_uid,
        job_namespace=status.job_namespace,
        world_size=status.world_size,
        hold=spec.hold,
        deletion_policy=spec.deletion_policy,
        phase="" if status.phase is None else status.phase,
        committed_at=_stamp_or_none(status.committed_at),
        started_at=_stamp_or_none(status.started_at),
        payload_bytes=status.bytes or 0,
        persisted=holds(CheckpointCondition.PERSISTED),
        quarantined=holds(CheckpointCondition.QUARANTINED),
        deleting=meta.deletion_timestamp is not None,
        has_finalizer=labels.DATA_FINALIZER in (meta.finalizers or []),
    )


# --------------------------------------------------------------------------- pods, nodes


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
    )


def _container(statuses: Any, name: str) -> Mapping[str, Any]:
    return next((s for s in statuses or [] if s.get("name") == name), {})


def _finished_at(container: Mapping[str, Any]) -> datetime | None:
    """Return when the container last ended, or None if it has not ended or the time is missing."""
    for key in ("state", "lastState"):
        ended = (container.get(key) or {}).get("terminated") or {}
        if ended.get("finishedAt"):
            return _stamp_or_none(str(ended["finishedAt"]))
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


LOST_NODE_TAINTS = frozenset(
    {
        Taint("node.kubernetes.io/not-ready", "NoSchedule"),
        Taint("node.kubernetes.io/unreachable", "NoSchedule"),
        Taint("node.kubernetes.io/out-of-service", "NoSchedule"),
        Taint("node.kubernetes.io/out-of-service", "NoExecute"),
    }
)
"""Taints that stop the scheduler from placing pods on a lost node. `not-ready` and `unreachable` with the
effect NoExecute are missing: the API server adds tolerations of both to every pod, and the scheduler ignores
their tolerationSeconds (https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration)."""


def node_view(raw: Mapping[str, Any]) -> NodeView:
    meta = raw.get("metadata") or {}
    taints = (raw.get("spec") or {}).get("taints") or []
    found = {Taint(str(t.get("key")), str(t.get("effect"))) for t in taints}
    return NodeView(
        name=str(meta.get("name")),
        taints=frozenset(found & LOST_NODE_TAINTS),
        labels=dict(meta.get("labels") or {}),
    )
