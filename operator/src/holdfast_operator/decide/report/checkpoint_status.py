"""The phase of a Checkpoint object, and the conditions that follow from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    CheckpointStatus,
    changed,
)
from holdfast_core.ids import CheckpointId
from holdfast_operator.model.actions import Action, DesiredObject
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.objects import render_change


def with_phase(
    status: CheckpointStatus,
    phase: CheckpointPhase,
    now: Now,
    *,
    pinned: bool,
    persisted: bool = False,
    replicated: bool = False,
    reason: Reason | None = None,
    message: str = "",
) -> CheckpointStatus:
    """Return the status in that phase. Conditions of other types stay as they are.

    Args:
        pinned: Whether a user has pinned the checkpoint.
        reason: Reason of the conditions. None stands for the usual one of the phase.
        message: Message of the conditions Committed and Restorable. "" stands for the usual one.
    """
    done = phase in (CheckpointPhase.COMMITTED, CheckpointPhase.DELETING)
    why = reason or (Reason.COMMITTED if done else Reason.SAVE_REQUESTED)
    durable = "every shard and the manifest are durable"
    committed = message or (durable if done else "the save is in progress")
    pruning = Reason.PRUNING if phase is CheckpointPhase.DELETING else why
    stored = "every shard and the manifest are in the object store" if persisted else ""
    restorable = persisted and phase is CheckpointPhase.COMMITTED
    conditions = (
        (CheckpointCondition.COMMITTED, done, why, committed),
        (CheckpointCondition.REPLICATED, replicated, pruning, ""),
        (
            CheckpointCondition.PERSISTED,
            persisted,
            Reason.PERSISTED if persisted else pruning,
            stored,
        ),
        (CheckpointCondition.RESTORABLE, restorable, pruning, message),
        (CheckpointCondition.PINNED, pinned, Reason.PINNED if pinned else Reason.NOT_PINNED, ""),
    )
    status = changed(status, phase=phase)
    for kind, value, given, text in conditions:
        status = status.with_condition(kind, value, given, text, now.utc)
    return status


def marks(
    checkpoints: Iterable[Checkpoint], quarantined: AbstractSet[CheckpointId], now: Now
) -> list[Action]:
    """Return the writes that set condition Quarantined of Checkpoint objects as the job's status demands."""
    kind = CheckpointCondition.QUARANTINED
    actions: list[Action] = []
    for checkpoint in checkpoints:
        marked = checkpoint.status.is_true(kind)
        if checkpoint.deleting or marked == (checkpoint.id in quarantined):
            continue
        reason = Reason.RELEASED if marked else Reason.QUARANTINED
        text = (
            ""
            if marked
            else "ranks that restored it failed repeatedly; the job does not restore it"
        )
        status = checkpoint.status.with_condition(kind, not marked, reason, text, now.utc)
        actions.append(DesiredObject(render_change(checkpoint, status)))
    return actions
