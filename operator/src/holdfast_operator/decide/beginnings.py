"""Passes over a job that is over, suspended, resized, short of nodes, or has no round yet. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import ElasticStatus, JobCondition, changed
from holdfast_operator.decide import (
    acceptance,
    checkpoints,
    failures,
    gang,
    kept_pods,
    lifecycle,
    new_rounds,
    releases,
    resizing,
)
from holdfast_operator.decide.facts import resize, scheduling, times
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.status import (
    Note,
    after_write,
    must_write,
    refresh_kept,
    set_condition,
)
from holdfast_operator.decide.writes import (
    WAITING_SECONDS,
    begin_round,
    renamed,
    with_status,
    with_status_write,
    written,
)
from holdfast_operator.model.actions import (
    Action,
    CommitPersisted,
    Decision,
    EmitEvent,
    EventKind,
    WriteStatus,
)
from holdfast_operator.model.job import JobMemory, Now, Seen
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_of

GATHER_SECONDS = 30.0
"""Time for which a gang that found a node waits for nodes for its other missing workers. Each growth costs a
save and a restart."""


def over(world: World, memory: JobMemory, now: Now) -> Decision:
    """Return the decision about a job that has completed or failed.

    A commit gets its Checkpoint object before the status records it. So an object that a user deletes after
    the end is not created again. The create is repeated only while it fails.
    """
    job, status = world.observed.job, world.status
    commit = checkpoints.pending_commit(world)
    if commit is not None:
        record = checkpoints.record_of(world, commit, now)
        if record and not memory.record_refused:
            return Decision.of(record, 0.0, "the last commit is recorded", memory)
        status = changed(status, last_persisted=commit)
        text = f"step {commit.step} of round {commit.round} is persisted"
        event = EmitEvent(EventKind.NORMAL, Reason.PERSISTED, text)
        write = CommitPersisted(job.resource_version, status)
        return Decision.of((write, *record, event), 0.0, text, memory)
    if status.is_true(JobCondition.PODS_KEPT):
        status = renamed(world, now, refresh_kept(world, now, status))
    present = World(with_status(world, status))
    kept = kept_pods.after_the_end(present)
    status = kept_pods.with_condition(status, present, kept, now)
    actions: list[Action] = []
    if must_write(job.status, status, memory, now, world.observed.routine_seconds):
        actions.append(WriteStatus(job.resource_version, status))
        memory = after_write(memory, world, now)
    if memory.record_refused:
        actions.extend(checkpoints.records(world, now))
    actions.extend(
        checkpoints.expire_requests(world, now) or checkpoints.quarantine_marks(world, now)
    )
    actions.extend(releases.release_all(world, "the job is over"))
    actions.extend(lifecycle.after_the_end(world, now, kept=kept is not None))
    if kept is not None:
        actions.extend(gang.seals(world))  # the members of an unsealed round answer only after it
    if kept_pods.is_requested(kept) and status.restore_point is not None:
        # A sidecar whose container restarts after the end needs ROUND again.
        plan = gang.round_actions(present, memory, now)
        actions.extend((*plan.actions, *lifecycle.request_stop(present, job_is_over=True)))
        memory = plan.memory
    # Launchers leave when the version is acknowledged, and their pods end.
    state = world.coordinator
    acted = None if state is None or kept is not None else state.version
    return Decision.of(actions, WAITING_SECONDS, "the job is over", memory, acted)


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
        return Decision.of(actions, WAITING_SECONDS, "suspended", memory, acted)
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
            return Decision.of((), WAITING_SECONDS, problem.message, memory)
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
        if at_work or failures.drains(world, memory, now) or not lifecycle.may_suspend_now(world):
            return None
    workers = resize.next_workers(world)
    job, had = world.observed.job, f"the gang had {len(world.members)} workers"
    note = Note(Reason.RESIZED, f"spec.workers is {workers}, and {had}")
    if resize.is_growing(job, world.status):
        note = Note(Reason.GROWN, f"there are nodes for {workers} workers, and {had}")
    elif workers < job.spec.workers:
        note = Note(Reason.RESIZED, f"elastic.min is {workers}, and {had}")
    status = new_rounds.resized_round(world, workers, note, now)
    status = recovery.interrupted(status, memory)
    text = f"round {status.restart_round} begins: {note.message}"
    event = EmitEvent(EventKind.NORMAL, note.reason, text)
    return begin_round(world, memory, now, status, (), event)


def shrink_gang(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision that begins a round with fewer workers, or None if it is not due or not possible.

    All pods of the round are new, as after a resize. No committed step is lost with the old ones.
    """
    job = world.observed.job
    if job.spec.suspend or not resize.lacks_nodes(world, memory, now):
        return None
    if resizing.shrink_obstacle(world) is not None:
        return None
    workers = resize.fewer_workers(world)
    text = f"{scheduling.describe(world)}. The gang continues with {workers} of {job.spec.workers} workers"
    note = Note(Reason.SHRUNK, text)
    status = new_rounds.resized_round(world, workers, note, now)
    kind = JobCondition.WORKERS_MISSING
    status = set_condition(status, kind, True, note, now, job.generation)
    status = recovery.interrupted(status, memory)
    text = f"round {status.restart_round} begins with {workers} workers"
    event = EmitEvent(EventKind.NORMAL, Reason.ROUND_BEGAN, text)
    return begin_round(world, memory, now, status, (), event)


def grow_gang(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision to resize the gang to the workers for which there are nodes, or None.

    The status records the number. Then the gang is resized as after a change of spec.workers.
    """
    job, present = world.observed.job, len(world.members)
    found = len(world.placeholders_with_nodes)
    if not found or not resizing.may_grow(world):
        return None
    workers = min(present + found, job.spec.workers)
    gathered = times.seconds_since(memory.seen_at(Seen.ROOM), now) >= GATHER_SECONDS
    if workers < job.spec.workers and not gathered:
        return None
    record = ElasticStatus(workers=workers, of_workers=job.spec.workers)
    status = changed(world.status, elastic=record)
    status = resizing.with_missing_workers(status, world, memory, now)
    return written(world, memory, now, status, [], f"the gang grows to {workers} workers")


def replace_late_pods(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision to avoid the nodes on which pods have not started in time, or None if all have.

    The next pass creates the pods again (avoidance.py).
    """
    status = scheduling.with_late_nodes(world, memory, now)
    if status is world.status:
        return None
    limit = world.observed.job.spec.start_timeout_seconds
    known = {f.node for f in world.status.node_failures if f.by_rule}
    avoided = [f.node for f in status.node_failures if f.by_rule and f.node not in known]
    text = scheduling.describe_late(world, memory, now, limit) or ""
    text += f". New pods avoid {first_of(avoided)}, and the pods there are created again"
    event = EmitEvent(EventKind.WARNING, Reason.POD_NOT_STARTED, text)
    return written(world, memory, now, status, [event], text)


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
