"""Events for conditions that turn bad or recover, and for recoveries that are complete or interrupted. Pure.

A condition shows only the present. The Events tell a user who looks an hour later what happened.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition, RecoveryStatus, TrainingJobStatus
from holdfast_operator.decide.facts.world import World, has_no_gang
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.conditions import straggler_events
from holdfast_operator.model.actions import Decision, EmitEvent, EventKind, normal, warning
from holdfast_operator.model.reasons import Reason

_GOOD_IF = {
    JobCondition.LAST_CHECKPOINT_SUCCEEDED: True,
    JobCondition.REMOTE_TIER_HEALTHY: True,
    JobCondition.FAILURE_RULES_APPLY: True,
    JobCondition.SPEC_APPLIED: True,
    JobCondition.SIDECARS_UNREACHABLE: False,
    JobCondition.CHECKPOINT_MISSING: False,
    JobCondition.NODES_AVOIDED: False,
    JobCondition.NODES_LEAVING: False,
    JobCondition.UNSCHEDULABLE: False,
    JobCondition.PODS_KEPT: False,
    JobCondition.HANGS_REPEAT: False,
}
"""Conditions with an Event when they become bad, and when they are good again, and whether true is good."""
_BY_REASON: dict[JobCondition, dict[str, EventKind]] = {
    # The rounds that a resize begins have Events of their own.
    JobCondition.RESIZING: {
        Reason.NO_OBJECT_TIER: EventKind.WARNING,
        Reason.STOPPING: EventKind.NORMAL,
        Reason.RESIZED: EventKind.NORMAL,
    },
    JobCondition.WORKERS_MISSING: {
        Reason.SHRUNK: EventKind.WARNING,
        Reason.CANNOT_SHRINK: EventKind.WARNING,
        Reason.GROWING: EventKind.NORMAL,
        Reason.ALL_WORKERS: EventKind.NORMAL,
    },
    # For other reasons, other code emits an Event on the job.
    JobCondition.RUNNING: {
        Reason.CONTAINER_CANNOT_START: EventKind.WARNING,
        Reason.CREATE_REFUSED: EventKind.WARNING,
        Reason.NODE_NAME_UNUSABLE: EventKind.WARNING,
    },
    JobCondition.SUSPENDED: {Reason.SUSPENDED: EventKind.NORMAL},
}
"""Conditions with an Event when they get one of these reasons."""
_ENDS = {
    JobCondition.SUSPENDED: "the suspension of the job",
    JobCondition.FAILED: "the failure of the job",
    JobCondition.COMPLETE: "the end of the job",
}
"""Conditions that end a recovery, and the text for each in the Event."""


def with_notices(decision: Decision, world: World) -> Decision:
    """Return the decision with Events for the conditions and stragglers that its status write changes."""
    if decision.status is None:
        return decision
    before, after = world.status, decision.status.status
    events = [*notices(before, after), *straggler_events(before, after, world)]
    return replace(decision, events=(*decision.events, *events))


def notices(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Warning for each condition that is bad for a new reason, and Normal Events.

    A Normal Event is returned for each condition that is good again. Each recovery has one Event, when it is
    complete or when it is interrupted.
    """
    events = _end_of_recovery(before, after)
    for kind in _GOOD_IF:
        events.extend(_turned(kind, before, after))
    for kind in _BY_REASON:
        events.extend(_has_a_new_reason(kind, before, after))
    return [*events, *_quarantine(before, after), *_promotions(before, after)]


def _end_of_recovery(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return the Event about a recovery that was open before, or about one that is complete at once."""
    events = []
    was_open = _open_recovery(before)
    if was_open is not None:
        cause = _interruption(before, after)
        now = next((r for r in after.recoveries if r.round == was_open.round), was_open)
        if cause is not None and now.total_seconds is None:
            text = recovery.describe_interrupted(now, cause)
            events.append(warning(Reason.RECOVERY_INTERRUPTED, text))
    old, new = before.last_recovery, after.last_recovery
    known = old is not None and new is not None and old.round == new.round and was_open is None
    if new is not None and new.total_seconds is not None and not known:
        events.append(normal(Reason.RECOVERED, recovery.describe(new)))
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
    """Return the Event about a condition that is bad for a new reason, or good again."""
    old, new = before.condition(kind), after.condition(kind)
    if new is None:
        return []
    was_bad = old is not None and old.is_true is not _GOOD_IF[kind]
    if new.is_true is not _GOOD_IF[kind]:
        is_known = old is not None and was_bad and old.reason == new.reason
        return [] if is_known else [warning(new.reason, new.message)]
    return [normal(new.reason, new.message)] if was_bad else []


def _has_a_new_reason(
    kind: JobCondition, before: TrainingJobStatus, after: TrainingJobStatus
) -> list[EmitEvent]:
    """Return the Event about a condition whose reason is another one now."""
    old, new = before.condition(kind), after.condition(kind)
    if new is None or (old is not None and old.reason == new.reason):
        return []
    event = _BY_REASON[kind].get(new.reason)
    is_first = old is None and new.reason == Reason.RESIZED
    return [] if event is None or is_first else [EmitEvent(event, new.reason, new.message)]


def _promotions(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Normal Event for each spare that becomes a worker."""
    return [
        normal(
            Reason.SPARE_PROMOTED,
            f"spare pod {r.pod} is worker {r.worker} from round {after.members[r.worker]} on",
        )
        for r in after.promoted_since(before)
    ]


def _quarantine(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Warning for each checkpoint that is quarantined now, and a Normal Event for each release."""
    events = [
        warning(
            Reason.QUARANTINED,
            f"step {q.step} of round {q.round} is quarantined: ranks that restored it failed again and "
            "again before one had finished a step",
        )
        for q in after.quarantined
        if q not in before.quarantined
    ]
    released = (q for q in before.quarantined if q not in after.quarantined)
    return events + [
        normal(
            Reason.RELEASED,
            f"step {q.step} of round {q.round} is released",
        )
        for q in released
    ]
