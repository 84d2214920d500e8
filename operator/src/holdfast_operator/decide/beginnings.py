"""Passes over a job that is over, suspended, resized, not scheduled in time, or has no round yet. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition, changed
from holdfast_operator.decide import acceptance, checkpoints, gang, lifecycle, new_rounds, releases
from holdfast_operator.decide.facts import failure, resize, scheduling
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.decide.writes import (
    WAITING_SECONDS,
    begin_round,
    with_status,
    with_status_write,
    written,
)
from holdfast_operator.model.actions import Action, Decision, EmitEvent, EventKind
from holdfast_operator.model.job import JobMemory, Now
from holdfast_operator.model.reasons import Reason


def over(world: World, memory: JobMemory, now: Now) -> Decision:
    state = world.coordinator
    actions = [
        *(checkpoints.expire_requests(world, now) or checkpoints.quarantine_marks(world, now)),
        *releases.release_all(world, "the job is over"),
        *lifecycle.after_the_end(world, now),
    ]
    acted = None if state is None else state.version
    return Decision(tuple(actions), WAITING_SECONDS, "the job is over", memory, acted)


def suspended(world: World, memory: JobMemory, now: Now) -> Decision:
    job = world.observed.job
    status = job.status
    generation = job.generation
    if not status.is_true(JobCondition.SUSPENDED):
        status = recovery.interrupted(lifecycle.suspended(world, now), memory)
        return written(world, memory, now, status, [], "the job is suspended without a save")
    if lifecycle.must_withdraw(world):
        status = lifecycle.withdrawn(world, now)
        return written(world, memory, now, status, [], "the suspension is withdrawn")
    if job.spec.suspend:
        acted = None if world.coordinator is None else world.coordinator.version
        freed = releases.release_all(world, "the job is suspended")
        actions = (*lifecycle.delete_all_pods(world), *freed)
        return Decision(actions, WAITING_SECONDS, "suspended", memory, acted)
    if status.restart_round is None:
        note = Note(Reason.RESUMED, "spec.suspend is false")
        status = set_condition(status, JobCondition.SUSPENDED, False, note, now, generation)
        return written(world, memory, now, status, [], "the job is resumed")
    status = new_rounds.resumed_round(world, now)
    event = EmitEvent(EventKind.NORMAL, Reason.RESUMED, f"round {status.restart_round} begins")
    return begin_round(world, memory, now, status, (), event)


def first_round(world: World, memory: JobMemory, now: Now) -> Decision:
    job = world.observed.job
    problem = acceptance.find_problem(world)
    status = lifecycle.accepted(world, now, problem)
    if problem is not None:
        old = job.status.condition(JobCondition.ACCEPTED)
        events: list[Action] = []
        if old is None or old.reason != problem.reason:
            kind = (
                EventKind.NORMAL if problem.reason == Reason.STORE_NOT_PROBED else EventKind.WARNING
            )
            events.append(EmitEvent(kind, problem.reason, problem.message))
        same = old is not None and (old.reason, old.message) == (problem.reason, problem.message)
        if same and job.status.observed_generation == job.generation:
            return Decision((), WAITING_SECONDS, problem.message, memory)
        decision = written(world, memory, now, status, events, problem.message)
        return replace(decision, requeue_after_seconds=WAITING_SECONDS)
    begun = new_rounds.first_round(World(with_status(world, status)), now)
    event = EmitEvent(EventKind.NORMAL, Reason.ROUND_BEGAN, f"round {begun.restart_round} begins")
    return begin_round(world, memory, now, begun, (), event)


def resize_gang(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision that begins the round with the new number of workers, or None if it is not due."""
    if world.observed.job.spec.suspend or not lifecycle.may_resize(world):
        return None
    asked = lifecycle.stop_requested(world.status)
    if not (asked and lifecycle.stopped_and_saved(world)):
        state = world.coordinator
        at_work = state is not None and state.running and not state.dead
        if at_work or failure.drains(world, memory, now) or not lifecycle.may_suspend_now(world):
            return None
    workers = resize.next_workers(world)
    text = f"spec.workers is {workers}, and the gang had {len(world.members)} workers"
    status = new_rounds.resized_round(world, workers, Note(Reason.RESIZED, text), now)
    status = recovery.interrupted(status, memory)
    event = EmitEvent(
        EventKind.NORMAL, Reason.RESIZED, f"round {status.restart_round} begins: {text}"
    )
    return begin_round(world, memory, now, status, (), event)


def schedule(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision about a gang that was not scheduled in time, or None if there is nothing to do.

    1. A new round begins, in which all pods are new (CAS 1).
    2. The pods of the round before are deleted.
    3. After the back-off the status says that the pods may be created.
    """
    left = scheduling.seconds_until_next_try(world, now)
    if left is None:
        kept = not scheduling.timed_out(world, memory, now) or scheduling.lost_if_deleted(world)
        if kept:
            return None
        status = recovery.interrupted(new_rounds.round_after_time_out(world, now), memory)
        text = f"round {status.restart_round} begins after a back-off: {scheduling.describe(world)}"
        event = EmitEvent(EventKind.NORMAL, Reason.ROUND_BEGAN, text)
        return begin_round(world, memory, now, status, (), event)
    if left > 0:
        known = world.status.condition(JobCondition.UNSCHEDULABLE)
        note = Note(Reason.NOT_SCHEDULED, "" if known is None else known.message)
        actions = gang.delete_obsolete(world)
        return with_status_write(world, memory, now, actions, note, min(left, WAITING_SECONDS))
    tries = world.status.scheduling
    assert tries is not None
    status = changed(world.status, scheduling=changed(tries, retry_at=None))
    return written(world, memory, now, status, [], "the pods of the gang are created again")
