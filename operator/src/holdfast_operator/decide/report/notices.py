"""Events for conditions that turn bad or recover, and for recoveries that are complete or interrupted. Pure.

A condition shows only the present. The Events tell a user who looks an hour later what happened.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition, RecoveryStatus, TrainingJobStatus
from holdfast_operator.decide.facts.world import has_no_gang
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.stragglers import straggler_events
from holdfast_operator.model.actions import Decision, EmitEvent, EventKind
from holdfast_operator.model.reasons import Reason

_HEALTH = (
    JobCondition.LAST_CHECKPOINT_SUCCEEDED,
    JobCondition.REMOTE_TIER_HEALTHY,
    JobCondition.FAILURE_RULES_APPLY,
    JobCondition.SPEC_APPLIED,
)
_BAD_IF_TRUE = (
    JobCondition.SIDECARS_UNREACHABLE,
    JobCondition.CHECKPOINT_MISSING,
    JobCondition.NODES_AVOIDED,
    JobCondition.NODES_LEAVING,
    JobCondition.UNSCHEDULABLE,
    JobCondition.PODS_KEPT,
    JobCondition.HANGS_REPEAT,
)
"""Conditions that are bad while they are true."""
_ENDS = {
    JobCondition.SUSPENDED: "the suspension of the job",
    JobCondition.FAILED: "the failure of the job",
    JobCondition.COMPLETE: "the end of the job",
}
"""Conditions that end a recovery, and the text for each in the Event."""
_TROUBLE = frozenset(
    {Reason.CONTAINER_CANNOT_START, Reason.CREATE_REFUSED, Reason.NODE_NAME_UNUSABLE}
)
"""Reasons of Running=False for which no other code emits an Event on the job."""


def with_notices(decision: Decision, before: TrainingJobStatus) -> Decision:
    """Return the decision with Events for the conditions that its status write changes."""
    if decision.status is None:
        return decision
    events = notices(before, decision.status.status)
    return replace(decision, events=(*decision.events, *events))


def notices(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Warning for each condition that is bad for a new reason, and Normal Events.

    A Normal Event is returned for each condition that is good again. Each recovery has one Event, when it is
    complete or when it is interrupted.
    """
    events = _end_of_recovery(before, after)
    for kind in _HEALTH:
        old, new = before.condition(kind), after.condition(kind)
        if new is None:
            continue
        was_bad = old is not None and not old.is_true
        if new.is_true and was_bad:
            events.append(EmitEvent(EventKind.NORMAL, new.reason, new.message))
        elif not new.is_true and (old is None or old.is_true or old.reason != new.reason):
            events.append(EmitEvent(EventKind.WARNING, new.reason, new.message))
    for kind in _BAD_IF_TRUE:
        events.extend(_turned(kind, before, after))
    suspended = after.condition(JobCondition.SUSPENDED)
    if suspended is not None and suspended.is_true and not before.is_true(JobCondition.SUSPENDED):
        events.append(EmitEvent(EventKind.NORMAL, suspended.reason, suspended.message))
    events.extend(straggler_events(before, after))
    events.extend(_resize(before, after))
    events.extend(_missing_workers(before, after))
    events.extend(_quarantine(before, after))
    events.extend(_promotions(before, after))
    old, new = before.condition(JobCondition.RUNNING), after.condition(JobCondition.RUNNING)
    trouble = new is not None and not new.is_true and new.reason in _TROUBLE
    if new is not None and trouble and (old is None or old.reason != new.reason):
        events.append(EmitEvent(EventKind.WARNING, new.reason, new.message))
    return events


def _end_of_recovery(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return the Event about a recovery that was open before, or about one that is complete at once."""
    events = []
    was_open = _open_recovery(before)
    if was_open is not None:
        cause = _interruption(before, after)
        now = next((r for r in after.recoveries if r.round == was_open.round), was_open)
        if cause is not None and now.total_seconds is None:
            text = recovery.describe_interrupted(now, cause)
            events.append(EmitEvent(EventKind.WARNING, Reason.RECOVERY_INTERRUPTED, text))
    old, new = before.last_recovery, after.last_recovery
    known = old is not None and new is not None and old.round == new.round and was_open is None
    if new is not None and new.total_seconds is not None and not known:
        events.append(EmitEvent(EventKind.NORMAL, Reason.RECOVERED, recovery.describe(new)))
    return events


def _open_recovery(status: TrainingJobStatus) -> RecoveryStatus | None:
    """Return the recovery of the current round if it is neither complete nor interrupted."""
    record = status.last_recovery
    if record is None or record.total_seconds is not None or has_no_gang(status):
        return None
    return record if record.round == status.restart_round else None


def _interruption(before: TrainingJobStatus, after: TrainingJobStatus) -> str | None:
    if after.restart_round != before.restart_round:
        return f"round {after.restart_round}"
    return next((text for kind, text in _ENDS.items() if after.is_true(kind)), None)


def _turned(
    kind: JobCondition, before: TrainingJobStatus, after: TrainingJobStatus
) -> list[EmitEvent]:
    """Return the Events for a condition that is bad when it is true."""
    old, new = before.condition(kind), after.condition(kind)
    if new is None:
        return []
    was_bad = old is not None and old.is_true
    if new.is_true and (not was_bad or old is None or old.reason != new.reason):
        return [EmitEvent(EventKind.WARNING, new.reason, new.message)]
    if not new.is_true and was_bad:
        return [EmitEvent(EventKind.NORMAL, new.reason, new.message)]
    return []


def _resize(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return the Event of a resize that stops the gang, is refused, or is over.

    The rounds that it begins have Events of their own.
    """
    old, new = before.condition(JobCondition.RESIZING), after.condition(JobCondition.RESIZING)
    if new is None or (old is not None and old.reason == new.reason):
        return []
    if new.reason == Reason.NO_OBJECT_TIER:
        return [EmitEvent(EventKind.WARNING, new.reason, new.message)]
    done = new.reason == Reason.RESIZED and new.is_false
    has_event = new.reason == Reason.STOPPING or (done and old is not None)
    return [EmitEvent(EventKind.NORMAL, new.reason, new.message)] if has_event else []


def _promotions(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Normal Event for each spare that becomes a worker."""
    return [
        EmitEvent(
            EventKind.NORMAL,
            Reason.SPARE_PROMOTED,
            f"spare pod {r.pod} is worker {r.worker} from round {r.birth} on",
        )
        for r in after.promoted_since(before)
    ]


def _missing_workers(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return the Event of an elastic gang that shrinks, cannot shrink, grows, or has all of its workers."""
    kind = JobCondition.WORKERS_MISSING
    old, new = before.condition(kind), after.condition(kind)
    if new is None or (old is not None and old.reason == new.reason):
        return []
    match new.reason:
        case Reason.SHRUNK | Reason.CANNOT_SHRINK:
            return [EmitEvent(EventKind.WARNING, new.reason, new.message)]
        case Reason.GROWING | Reason.ALL_WORKERS:
            return [EmitEvent(EventKind.NORMAL, new.reason, new.message)]
    return []


def _quarantine(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Warning for each checkpoint that is quarantined now, and a Normal Event for each release."""
    old, new = {q.id for q in before.quarantined}, {q.id for q in after.quarantined}
    events = [
        EmitEvent(
            EventKind.WARNING,
            Reason.QUARANTINED,
            f"step {q.step} of round {q.round} is quarantined: {q.restarts} restarts from it failed before "
            "a rank had finished a step",
        )
        for q in after.quarantined
        if q.id not in old
    ]
    released = (q for q in before.quarantined if q.id not in new)
    return events + [
        EmitEvent(
            EventKind.NORMAL, Reason.RELEASED, f"step {q.step} of round {q.round} is released"
        )
        for q in released
    ]
