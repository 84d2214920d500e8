"""Convert a CheckpointRecord to the status of a Checkpoint object, as a merge patch. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from holdfast_core.api import CheckpointCondition, CheckpointPhase, TrainingJob
from holdfast_core.clock import stamp
from holdfast_operator.model.actions import CheckpointRecord
from holdfast_operator.model.reasons import Reason

FORMAT_VERSION = 1


def checkpoint_status(
    job: TrainingJob, record: CheckpointRecord, now: datetime, previous: dict[str, Any]
) -> dict[str, Any]:
    """Return a merge patch of `.status`.

    Args:
        job: The job that saved the checkpoint.
        record: The new status.
        now: Transition time of conditions whose value changes.
        previous: The present status, or {}. Its other conditions, and transition times of values that do not
            change, are kept.
    """
    known = {c["type"]: c for c in previous.get("conditions") or []}
    wanted = _conditions(record)
    conditions = [_stamped(c, known.get(c["type"]), now) for c in wanted]
    names = {c["type"] for c in wanted}
    conditions.extend(c for c in known.values() if c["type"] not in names)
    checkpoint = record.checkpoint
    status: dict[str, Any] = {"phase": record.phase or None, "conditions": conditions}
    if checkpoint is not None:
        status.update(
            round=checkpoint.round,
            manifest=record.manifest,
            jobUid=record.job_uid,
            jobNamespace=job.namespace,
            worldSize=record.world_size,
            formatVersion=FORMAT_VERSION,
        )
    if checkpoint is not None and record.persisted and record.world_size:
        status["shards"] = {
            "total": record.world_size,
            "object": record.world_size,
            "summary": f"0/0/0/{record.world_size}",
        }
    if record.payload_bytes:
        status["bytes"] = record.payload_bytes
    if record.parent is not None:
        status["parent"] = record.parent
    if record.started_at is not None:
        status["startedAt"] = stamp(record.started_at)
    if record.committed_at is not None:
        status["committedAt"] = stamp(record.committed_at)
    return status


def _conditions(record: CheckpointRecord) -> list[dict[str, Any]]:
    done = record.phase in (CheckpointPhase.COMMITTED, CheckpointPhase.DELETING)
    waiting = record.message or "the save is in progress"
    restorable = record.persisted and record.phase == CheckpointPhase.COMMITTED
    why = Reason.COMMITTED if done else Reason.SAVE_REQUESTED
    if record.phase == CheckpointPhase.DELETING:
        why = Reason.PRUNING
    return [
        _condition(
            CheckpointCondition.COMMITTED,
            done,
            Reason.COMMITTED if done else Reason.SAVE_REQUESTED,
            record.message or "every shard and the manifest are durable" if done else waiting,
        ),
        _condition(CheckpointCondition.REPLICATED, record.replicated, why, ""),
        _condition(
            CheckpointCondition.PERSISTED,
            record.persisted,
            Reason.PERSISTED if record.persisted else why,
            "every shard and the manifest are in the object store" if record.persisted else "",
        ),
        _condition(CheckpointCondition.RESTORABLE, restorable, why, record.message),
        _condition(
            CheckpointCondition.HELD,
            record.held,
            Reason.HELD if record.held else Reason.NOT_HELD,
            "",
        ),
    ]


def _condition(kind: str, value: bool, reason: str, message: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True" if value else "False",
        "reason": reason,
        "message": message,
    }


def _stamped(
    condition: dict[str, Any], known: dict[str, Any] | None, now: datetime
) -> dict[str, Any]:
    """Return the condition with its transition time, which stays the same if the value does not change."""
    if known is not None and known.get("status") == condition["status"]:
        return {**condition, "lastTransitionTime": known["lastTransitionTime"]}
    return {**condition, "lastTransitionTime": stamp(now)}
