"""Derive conditions, levels, goodput, the phase and Events from the observation. Pure.

`refresh` is applied to every status that is written, whatever the reason for the write, so the one write of a
pass contains all changes. A change of levels alone is written at most every LEVELS_EVERY_SECONDS.

A condition shows only the present. Events about conditions that turn bad or recover, and about recoveries,
tell a user who looks an hour later what happened.
"""

from __future__ import annotations

import math
from dataclasses import replace

from holdfast_core.api import (
    GoodputStatus,
    JobCondition,
    JobPhase,
    RecoveryStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.api.base import WithConditions
from holdfast_core.ids import Step, TierName
from holdfast_core.messages.schema import Failure
from holdfast_operator.decide.facts.nodes import with_leaving_nodes, with_spares, with_spares_ready
from holdfast_operator.decide.facts.scheduling import with_queue, with_scheduling
from holdfast_operator.decide.facts.sizes import wanted_workers
from holdfast_operator.decide.facts.spec import store_problem, with_adoption, with_spec_applied
from holdfast_operator.decide.facts.world import Note, World, has_no_gang
from holdfast_operator.decide.report import conditions, recovery
from holdfast_operator.decide.report.conditions import straggler_events
from holdfast_operator.model.actions import Decision, EmitEvent, EventKind, normal, warning
from holdfast_operator.model.reasons import Reason

LEVELS_EVERY_SECONDS = 10.0
"""Shortest interval between writes of levels. Otherwise each step of each job would cause a write in etcd."""


_PHASES = {
    JobCondition.FAILED: JobPhase.FAILED,
    JobCondition.COMPLETE: JobPhase.SUCCEEDED,
    JobCondition.SUSPENDED: JobPhase.SUSPENDED,
    JobCondition.RESTARTING: JobPhase.RESTARTING,
    JobCondition.RUNNING: JobPhase.RUNNING,
}
"""The phase for the first of these conditions that is true."""


def compute_phase(status: TrainingJobStatus) -> JobPhase:
    """Return the phase, a summary of the conditions for users. No decision reads it."""
    begun = JobPhase.PENDING if status.restart_round is None else JobPhase.STARTING
    return next((phase for kind, phase in _PHASES.items() if status.is_true(kind)), begun)


def refresh(world: World, status: TrainingJobStatus, note: Note | None = None) -> TrainingJobStatus:
    """Return `status` with everything that follows from the observation brought up to date.

    `note` is the reason and message of Running=False. Without it a running job stays Running.
    """
    for measure in (with_levels, _with_goodput, _with_flush, _with_recovery_closed):
        status = measure(status, world)
    status = _with_running(status, world, note)
    for report in _CONDITIONS:
        status = report(status, world)
    total = len(status.members) or world.spec.workers
    missing = wanted_workers(world.job, status) < world.spec.workers
    return changed(
        status,
        ready_workers=f"{_ready(world, status, total)}/{world.spec.workers if missing else total}",
        phase=compute_phase(status),
        observed_generation=world.job.generation,
    )


def _ready(world: World, status: TrainingJobStatus, total: int) -> int:
    """Return the number of workers that train, or have finished with the job."""
    if status.is_true(JobCondition.COMPLETE):
        return total
    # Pods end after the last write of a job that has no gang any more, and would be shown as ready for good.
    if status.restart_round is None or has_no_gang(status):
        return 0
    return sum(1 for m in world.members if m.pod is not None and m.pod.ready and m.alive)


def refresh_kept(world: World, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status of a failed job whose pods stay, with what its sidecars report of checkpoints."""
    status = _with_tier_conditions(with_levels(status, world), world)
    return conditions.with_held_uploads(conditions.with_missing(status, world), world)


def _with_flush(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return `status` with the longest flush, from which the grace period of new pods follows."""
    memory = world.memory
    if memory.flush_seconds <= 0:
        return status
    longest = max(math.ceil(memory.flush_seconds), status.flush_seconds or 0)
    return changed(status, flush_seconds=longest)


def with_levels(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return `status` with the step and the levels that the coordinator of its round reports.

    Committed levels and the step never go down here.
    """
    state = world.coordinator
    if state is None or status.restart_round != state.round or status.restore_point is None:
        return status
    step = None if state.progress is None else state.progress.first
    return changed(
        status,
        step=_higher(status.step, step),
        last_committed_step=_higher(status.last_committed_step, world.local_step),
        last_replicated_step=_higher(status.last_replicated_step, world.copied_step),
    )


def _higher(old: Step | None, new: Step | None) -> Step | None:
    return max((s for s in (old, new) if s is not None), default=None)


def _with_running(status: TrainingJobStatus, world: World, note: Note | None) -> TrainingJobStatus:
    if status.restart_round is None or has_no_gang(status):
        return status
    begun = status.restart_round == world.status.restart_round
    if begun and world.state.running and status.restore_point is not None:
        text = f"round {status.restart_round}: every rank has finished a step"
        status = world.with_condition(status, JobCondition.RUNNING, True, Reason.TRAINING, text)
        if status.condition(JobCondition.RESTARTING) is not None:
            done = Note(Reason.RECOVERED, f"round {status.restart_round} runs")
            status = world.with_condition(status, JobCondition.RESTARTING, False, *done)
        return status
    if status.is_true(JobCondition.RUNNING) and note is None:
        # A coordinator that does not answer does not mean that training has stopped.
        return status
    why = note or Note(Reason.STARTING, f"round {status.restart_round} starts")
    return world.with_condition(status, JobCondition.RUNNING, False, *why)


def _with_recovery_closed(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Complete the record of the recovery once every rank has finished a step or returned 0.

    The first round has no such record.
    """
    begun = status.last_recovery
    state = world.coordinator
    if begun is None or begun.round != status.restart_round or begun.total_seconds is not None:
        return status
    if state is None or state.round != begun.round or status.restore_point is None:
        return status
    if not (state.running or state.finished):
        return status
    return status.with_recovery(recovery.closed(begun, state, world))


def _with_goodput(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Add the time since the last count to training if the gang trained, else to recovery.

    The write that ends the job counts as well, because a job of a few seconds may have no other.
    """
    if status.restart_round is None or world.status.completion_time is not None:
        return status
    old = status.goodput or GoodputStatus(ratio=1.0)
    elapsed = max(0.0, world.seconds_since(world.memory.counted_at))
    trained = min(elapsed, _training_seconds(world))
    blocked = blocked_seconds(world)
    new = changed(
        old,
        training_seconds=old.training_seconds + trained,
        recovery_seconds=old.recovery_seconds + elapsed - trained,
        checkpoint_seconds=old.checkpoint_seconds
        + (0.0 if blocked is None else max(0.0, blocked - world.memory.blocked_counted_seconds)),
    )
    return changed(status, goodput=with_ratio(new))


def _training_seconds(world: World) -> float:
    """Return for how long the gang has trained in this round at least, infinite if Running is True."""
    if world.status.is_true(JobCondition.RUNNING):
        return math.inf
    state = world.coordinator
    if state is None or world.status.restore_point is None:
        return 0.0
    return world.now.monotonic - recovery.started_training_at(state, world)


def with_ratio(goodput: GoodputStatus) -> GoodputStatus:
    """Set the ratio, the share of all time that was training, without lost work and blocking saves."""
    total = goodput.training_seconds + goodput.recovery_seconds
    kept = goodput.training_seconds - goodput.checkpoint_seconds - goodput.lost_work_seconds
    return changed(goodput, ratio=1.0 if total <= 0 else min(1.0, max(0.0, kept / total)))


def blocked_seconds(world: World) -> float | None:
    """Return the seconds for which saves blocked training in this round, or None without progress.

    It is the maximum over the ranks, because the gang waits for its slowest rank.
    """
    progress = world.state.progress
    return None if progress is None else progress.blocked_seconds


def _with_tier_conditions(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    failures = world.state.failures
    local = next((f for f in failures if f.tier is not TierName.OBJECT), None)
    if local is not None:
        note = Note(local.reason, _located(world, local))
        status = world.with_condition(status, JobCondition.LAST_CHECKPOINT_SUCCEEDED, False, *note)
    elif world.local_step is not None:
        note = Note(Reason.COMMITTED, "the newest save is committed")
        status = world.with_condition(status, JobCondition.LAST_CHECKPOINT_SUCCEEDED, True, *note)
    if world.spec.store is None:
        return status
    problem, refused = store_problem(world), world.observed.memory.record_refused
    unprobed = problem is not None and problem.reason == Reason.STORE_NOT_PROBED
    remote = next((f for f in failures if f.tier is TierName.OBJECT), None)
    if problem is not None and not unprobed:
        healthy, note = False, problem
    elif refused:
        text = (
            f"{refused}. Until it is written, later uploads are not recorded, "
            "old checkpoints stay in the store, and the job does not end"
        )
        healthy, note = False, Note(Reason.CREATE_REFUSED, text)
    elif remote is not None:
        healthy, note = False, Note(remote.reason, _located(world, remote))
    elif unprobed:
        return status
    else:
        text = f"CheckpointStore {world.spec.store} passed its probe"
        healthy, note = True, Note(Reason.STORE_HEALTHY, text)
    return world.with_condition(status, JobCondition.REMOTE_TIER_HEALTHY, healthy, *note)


def _located(world: World, failure: Failure) -> str:
    """Return the message of a failure, preceded by its worker and node."""
    worker, text = failure.worker, failure.message
    return text if worker is None else f"{world.place(worker)}: {text}"


_CONDITIONS = (
    _with_tier_conditions,
    conditions.with_avoided_nodes,
    conditions.with_quarantine,
    conditions.with_missing,
    conditions.with_lost_checkpoints,
    conditions.with_rollback,
    conditions.with_held_uploads,
    conditions.with_rules,
    conditions.with_passed_hangs,
    with_spec_applied,
    with_leaving_nodes,
    conditions.with_stragglers,
    with_scheduling,
    with_queue,
    with_adoption,
    with_spares,
    with_spares_ready,
)
"""What every status that is written reports of the observation, in this order, after condition Running."""


def must_write(world: World, new: TrainingJobStatus) -> bool:
    """Return whether the new status must be written now.

    Changes of levels, ready workers, goodput and messages wait until the last write is LEVELS_EVERY_SECONDS
    old, or `routine_seconds` if that is longer. A new operator process waits as long after it first sees the
    job: the writes of a thousand jobs would delay the passes that matter by half a minute. All other changes
    are written immediately. A change of goodput alone is written only while Running is True. Otherwise a job
    that waits for days would cause a write every ten seconds.
    """
    old, memory = world.status, world.memory
    if _durable(old) != _durable(new):
        return True
    running = new.is_true(JobCondition.RUNNING)
    if old == (new if running else changed(new, goodput=old.goodput)):
        return False
    last = memory.round_seen_at if memory.levels_written_at is None else memory.levels_written_at
    every = max(LEVELS_EVERY_SECONDS, world.observed.routine_seconds)
    return last is None or world.seconds_since(last) >= every


def _durable(status: TrainingJobStatus) -> tuple[object, ...]:
    """Return the parts of the status whose changes may not wait for LEVELS_EVERY_SECONDS."""
    conditions = tuple(
        (c.type, c.status, c.reason, c.last_transition_time) for c in status.conditions
    )
    rest = changed(
        status,
        ready_workers=(status.ready_workers or "").partition("/")[2],  # the ready ones may wait
        step=None,
        # The first commit must not wait: once it is recorded, the job never starts without a checkpoint.
        last_committed_step=None if status.last_committed_step is None else Step(0),
        last_replicated_step=None,
        flush_seconds=None,
        goodput=None,
        conditions=(),
    )
    return rest, conditions


def remember_write(world: World) -> None:
    """Remember that the status is written, with the goodput up to now."""
    at, blocked = world.now.monotonic, blocked_seconds(world)
    world.remember(levels_written_at=at, counted_at=at)
    if blocked is not None:
        world.remember(blocked_counted_seconds=blocked)


# --------------------------------------------------------------------------- Events


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
    JobCondition.UPLOADS_HELD: False,
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
    JobCondition.CHECKPOINTS_LOST: {
        Reason.CHECKPOINTS_LOST: EventKind.WARNING,
        Reason.CHECKPOINTS_FOUND: EventKind.NORMAL,
    },
    JobCondition.ROLLED_BACK: {
        Reason.CHECKPOINT_NOT_FOUND: EventKind.WARNING,
        Reason.CHECKPOINT_NOT_RESTORABLE: EventKind.WARNING,
        Reason.WAITING_FOR_STORE: EventKind.WARNING,
        Reason.ROLLBACK_OUTDATED: EventKind.WARNING,
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
    for kind, good in _GOOD_IF.items():
        events.extend(turned(kind, good, before, after))
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


def turned(kind: str, good: bool, before: WithConditions, after: WithConditions) -> list[EmitEvent]:
    """Return the Event about a condition that is bad for a new reason, or good again.

    Args:
        good: Whether true is good.
    """
    old, new = before.condition(kind), after.condition(kind)
    if new is None:
        return []
    was_bad = old is not None and old.is_true is not good
    if new.is_true is not good:
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
