"""Events for conditions that turn bad or recover, and for complete recoveries of the gang. Pure.

A condition shows only the present. The Events tell a user who looks an hour later what happened.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_operator.decide.report import recovery
from holdfast_operator.model.actions import (
    BeginRound,
    ChooseRestorePoint,
    CommitPersisted,
    Decision,
    EmitEvent,
    EventKind,
    WriteStatus,
)
from holdfast_operator.model.reasons import Reason

_HEALTH = (JobCondition.LAST_CHECKPOINT_SUCCEEDED, JobCondition.REMOTE_TIER_HEALTHY)
_TROUBLE = frozenset({Reason.CONTAINER_CANNOT_START, Reason.CREATE_REFUSED})
"""Reasons of Running=False for which no other code emits an Event on the job."""


def with_notices(decision: Decision, before: TrainingJobStatus) -> Decision:
    """Return the decision with Events for the conditions that its status write changes."""
    for action in decision.actions:
        match action:
            case BeginRound() | ChooseRestorePoint() | CommitPersisted() | WriteStatus():
                events = notices(before, action.status)
                return replace(decision, actions=(*decision.actions, *events))
            case _:
                continue
    return decision


def notices(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Warning for each condition that is bad for a new reason, and Normal Events.

    A Normal Event is returned for each condition that is good again, and for a recovery that is complete.
    """
    events = _recovered(before, after)
    for kind in _HEALTH:
        old, new = before.condition(kind), after.condition(kind)
        if new is None:
            continue
        was_bad = old is not None and not old.is_true
        if new.is_true and was_bad:
            events.append(EmitEvent(EventKind.NORMAL, new.reason, new.message))
        elif not new.is_true and (old is None or old.is_true or old.reason != new.reason):
            events.append(EmitEvent(EventKind.WARNING, new.reason, new.message))
    events.extend(_silence(before, after))
    old, new = before.condition(JobCondition.RUNNING), after.condition(JobCondition.RUNNING)
    trouble = new is not None and not new.is_true and new.reason in _TROUBLE
    if new is not None and trouble and (old is None or old.reason != new.reason):
        events.append(EmitEvent(EventKind.WARNING, new.reason, new.message))
    return events


def _recovered(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    old, new = before.last_recovery, after.last_recovery
    if new is None or new.total_seconds is None:
        return []
    if old is not None and old.round == new.round and old.total_seconds is not None:
        return []
    return [EmitEvent(EventKind.NORMAL, Reason.RECOVERED, recovery.describe(new))]


def _silence(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return the Events for condition SidecarsUnreachable, which is bad when it is true."""
    old = before.condition(JobCondition.SIDECARS_UNREACHABLE)
    new = after.condition(JobCondition.SIDECARS_UNREACHABLE)
    if new is None:
        return []
    was_bad = old is not None and old.is_true
    if new.is_true and (not was_bad or old is None or old.reason != new.reason):
        return [EmitEvent(EventKind.WARNING, new.reason, new.message)]
    if not new.is_true and was_bad:
        return [EmitEvent(EventKind.NORMAL, new.reason, new.message)]
    return []
