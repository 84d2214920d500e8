"""Beginning and end of a job: acceptance, suspension, completion, failure, deadlines. Pure.

A rule that does not apply returns None.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

from holdfast_core.api import (
    JobCondition,
    TrainingJobStatus,
    changed,
)
from holdfast_core.messages.schema import GangRequest
from holdfast_operator.decide.acceptance import replacement_problem
from holdfast_operator.decide.checkpoints import has_object, pending_commit
from holdfast_operator.decide.facts import readable, resize
from holdfast_operator.decide.facts.apart import stored
from holdfast_operator.decide.facts.failure import Failure
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import Action, Call, CallPath, Delete
from holdfast_operator.model.job import Now, PodPhase
from holdfast_operator.model.reasons import Reason

EXIT_GRACE = timedelta(seconds=60)
"""Time after the end of a complete job for its launchers to exit. Pods that still run then are deleted."""

_UNTIL_THE_END = (
    JobCondition.RUNNING,
    JobCondition.RESTARTING,
    JobCondition.UNSCHEDULABLE,
    JobCondition.RESIZING,
    JobCondition.QUEUED,
    JobCondition.SPARES_READY,
    JobCondition.WORKERS_MISSING,
)
"""Conditions of a gang, which are false once the job is over or suspended."""


def is_over(status: TrainingJobStatus) -> bool:
    return status.is_true(JobCondition.COMPLETE) or status.is_true(JobCondition.FAILED)


def accepted(world: World, now: Now, problem: Note | None) -> TrainingJobStatus:
    """Return the status with condition Accepted: False for a problem, Unknown while the store is probed."""
    note = problem or Note(Reason.ACCEPTED, "the spec can be run")
    waiting = problem is not None and problem.reason == Reason.STORE_NOT_PROBED
    value = None if waiting else problem is None
    generation = world.observed.job.generation
    return set_condition(world.status, JobCondition.ACCEPTED, value, note, now, generation)


# --------------------------------------------------------------------------- the end


def _ended(
    status: TrainingJobStatus, world: World, now: Now, end: JobCondition, note: Note
) -> TrainingJobStatus:
    """Return the status with this end of the gang. The conditions of its work are false from now on."""
    generation = world.observed.job.generation
    for kind in _UNTIL_THE_END:
        if status.condition(kind) is not None:
            status = set_condition(status, kind, False, note, now, generation)
    return set_condition(status, end, True, note, now, generation)


def failed(world: World, now: Now, note: Note) -> TrainingJobStatus:
    """Return the status that ends the job as failed."""
    status = changed(world.status, completion_time=now.utc)
    return _ended(status, world, now, JobCondition.FAILED, note)


def deadline_passed(world: World, now: Now) -> Note | None:
    """Return the reason for failure if activeDeadlineSeconds has passed, else None."""
    if seconds_to_deadline(world, now) > 0:
        return None
    seconds = world.observed.job.spec.active_deadline_seconds
    return Note(Reason.DEADLINE_EXCEEDED, f"activeDeadlineSeconds {seconds} has passed")


def seconds_to_deadline(world: World, now: Now) -> float:
    """Return the time until activeDeadlineSeconds have passed; infinite without a deadline or a start."""
    start = world.status.start_time
    seconds = world.observed.job.spec.active_deadline_seconds
    if seconds is None or start is None:
        return math.inf
    return seconds - now.elapsed_seconds(start)


def completed(world: World, now: Now) -> TrainingJobStatus | None:
    """Return the status that completes the job, or None if it is not complete.

    A job is complete when every rank returned 0 or every pod succeeded, and every commit in the store is
    recorded. Ranks that stop for a drain return 0 as well, so while the pod of a member is being deleted the
    returns of the ranks do not count. A gang that was asked to stop does not complete the job either
    (stopped_for_nothing).
    """
    status = world.status
    if stop_requested(status):
        return None
    state = world.coordinator
    finished = (
        state is not None
        and state.finished
        and status.restore_point is not None
        and not state.dead
        and all(m.pod is not None and not m.pod.terminating for m in world.members)
    )
    if not (finished or _all_ended(world)) or not everything_recorded(world):
        return None
    note = Note(Reason.COMPLETED, "every rank returned 0")
    status = changed(status, completion_time=now.utc)
    return _ended(status, world, now, JobCondition.COMPLETE, note)


def everything_recorded(world: World) -> bool:
    """Return whether the newest commit in the store is in the status, and its Checkpoint object exists."""
    last = world.status.last_persisted
    return pending_commit(world) is None and (last is None or has_object(world, last.id))


def after_the_end(world: World, now: Now, *, kept: bool) -> list[Action]:
    """Return deletes of the pods that a job does not need after its end, and of the job after its TTL.

    Pods of members that have ended stay for their logs. Pods that still run are deleted immediately after a
    failure, and after EXIT_GRACE if the job is complete. Pods on lost nodes, and pods that are not members,
    are deleted immediately.

    Args:
        kept: Whether the pods of the members stay (kept_pods.py), and with them the job.
    """
    status = world.status
    ended = status.completion_time or now.utc
    failed_ = status.is_true(JobCondition.FAILED)
    overdue = failed_ or now.elapsed_seconds(ended) >= EXIT_GRACE.total_seconds()
    members = {m.pod.uid for m in world.members if m.pod is not None}
    actions: list[Action] = []
    for pod in world.observed.pods:
        if world.is_ahead(pod):
            continue
        if kept and pod.uid in members:
            continue
        lost = world.observed.node_lost(pod)
        running = pod.phase not in (PodPhase.SUCCEEDED, PodPhase.FAILED)
        unwanted = pod.uid not in members or (running and overdue) or lost
        if unwanted and (lost or not pod.terminating):
            why = "the job is over"
            actions.append(Delete(kinds.POD, pod.name, pod.uid, why, force=lost))
    ttl_seconds = world.observed.job.spec.ttl_seconds_after_finished
    if not kept and ttl_seconds is not None and now.elapsed_seconds(ended) >= ttl_seconds:
        job, why = world.observed.job, "ttlSecondsAfterFinished has passed"
        actions.append(Delete(job.KIND, job.name, job.uid, why))
    return actions


# --------------------------------------------------------------------------- resize


def may_resize(world: World) -> bool:
    """Return whether the gang is to have another number of workers, and nothing stands in the way."""
    return resize.is_asked_for(world) and resize_obstacle(world) is None


def resize_obstacle(world: World) -> Note | None:
    """Return why the gang keeps its number of workers although the spec asks for another one, or None.

    A gang that stopped while its store is away could neither save nor restore. Without a store, a gang may
    change until one of its pods has started.
    """
    begun = readable.recorded_commit(world) is not None or any(
        m.pod is not None and m.pod.started for m in world.members
    )
    if world.observed.job.spec.store is None and begun:
        return Note(
            Reason.NO_OBJECT_TIER,
            "the job has no object store, from which the new ranks could read the shards of the old ones. "
            f"It continues with {len(world.members)} workers. Create a new job with this number",
        )
    problem = replacement_problem(world)
    if problem is not None:
        return problem
    healthy = world.status.condition(JobCondition.REMOTE_TIER_HEALTHY)
    if healthy is not None and healthy.is_false:
        return Note(Reason.STORE_UNAVAILABLE, f"the object store is away: {healthy.message}")
    return None


# --------------------------------------------------------------------------- suspension


def suspended(world: World, now: Now) -> TrainingJobStatus:
    """Return the status of a suspended job."""
    store, last = world.observed.job.spec.store, world.status.last_persisted
    kept = "no committed step would be lost with the pods"
    if store is not None and last is not None:
        kept = (
            f"step {last.step} is kept in the CheckpointStore {store}, and the job resumes from it"
        )
    note = Note(Reason.SUSPENDED, f"spec.suspend is true: {kept}")
    # As for a Job of batch/v1, activeDeadlineSeconds counts from zero again when the job resumes.
    # All pods are new after the suspension, so an elastic gang then tries to have all of its workers.
    status = changed(world.status, start_time=None, scheduling=None, elastic=None)
    return _ended(status, world, now, JobCondition.SUSPENDED, note)


def may_suspend_now(world: World) -> bool:
    """Return whether all pods can be deleted now without the loss of a committed step.

    A gang that trains is asked to save first if the job has an object store.
    """
    if world.status.restart_round is None:
        return True
    stored = world.observed.job.spec.store is not None
    if stored and (trains(world) or pending_commit(world) is not None):
        return False
    return readable.lost_with_all_pods(world) is None


def must_withdraw(world: World) -> bool:
    """Return whether a suspension must be withdrawn, because it could now lose a committed step.

    That happens if the status says Suspended, no pod is deleted yet, and the gang has committed a step since:
    the operator was stopped in between, or the commit and the status write were concurrent.
    """
    untouched = all(m.pod is not None and not m.pod.terminating for m in world.members)
    if not untouched or stopped_and_saved(world):
        return False
    return readable.lost_with_all_pods(world) is not None


def withdrawn(world: World, now: Now) -> TrainingJobStatus:
    """Return the status that withdraws a suspension before a pod was deleted. The round continues."""
    job = world.observed.job
    note = suspend_note(world)
    if job.spec.store is not None:
        # The gang may have been asked to stop before it was suspended: this reason records it.
        note = replace(note, reason=Reason.STOPPING)
    status = changed(world.status, start_time=now.utc)
    return set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)


def trains(world: World) -> bool:
    """Return whether the gang trains with all of its members, so that it can be asked to save and stop."""
    state = world.coordinator
    return (
        state is not None
        and state.running
        and not state.dead
        and all(m.alive for m in world.members)
    )


def suspend_note(world: World) -> Note:
    """Return why a job whose spec.suspend is true is not suspended yet.

    The gang is asked to stop exactly if the reason is STOPPING.
    """
    lost = readable.lost_with_all_pods(world)
    if world.observed.job.spec.store is None:
        return Note(
            Reason.NO_OBJECT_TIER,
            (
                "the job has no object store: with its pods, all of its checkpoints would be lost. So "
                "it is not suspended, and no pod is created for it while spec.suspend is true. Delete "
                "the job, or create it again with checkpoint.object"
            ),
        )
    if trains(world):
        return Note(Reason.STOPPING, "the gang was requested to save and stop")
    if lost is None:
        return Note(Reason.NOT_PERSISTED, "the operator has to record the newest upload first")
    return Note(
        Reason.NOT_PERSISTED,
        (
            f"suspending now would lose work: {lost}. The gang recovers first, and then saves to the "
            "store and stops: condition Running says what it waits for. Delete its pods to give up "
            "the steps that only they have"
        ),
    )


def stop_requested(status: TrainingJobStatus) -> bool:
    """Return whether the gang of this round may have been asked to save and stop.

    The record, reason Stopping of condition Suspended or Resizing, is written before the gang is asked. It
    stays until the next round begins, because the request cannot be withdrawn, and ranks that stop for it
    return 0 although they have not finished.
    """
    return any(asked_for(status, kind) for kind in (JobCondition.SUSPENDED, JobCondition.RESIZING))


def asked_for(status: TrainingJobStatus, kind: JobCondition) -> bool:
    """Return whether this condition records that the gang was asked to save and stop."""
    condition = status.condition(kind)
    return condition is not None and condition.reason == Reason.STOPPING


def stopped_and_saved(world: World) -> bool:
    """Return whether the gang has stopped, and its newest committed step is in the object store."""
    return _stopped(world) and not _unsaved(world)


def stopped_for_nothing(world: World) -> tuple[Failure, ...]:
    """Return a failure if the gang stopped for a suspension or a resize and must start again in its pods.

    Either the stop is no longer wanted, or the newest step did not reach the store.
    """
    if not stop_requested(world.status) or not _stopped(world):
        return ()
    if not world.observed.job.spec.suspend and not may_resize(world):
        text = "the gang was asked to stop, and this is no longer wanted"
        if asked_for(world.status, JobCondition.SUSPENDED):
            text = "the gang stopped for a suspension, and spec.suspend is false again"
        return (Failure(Reason.RESUMED, text, disruption=True),)
    if _unsaved(world):
        text = "the gang stopped, but the object store lacks the newest step"
        return (Failure(Reason.NOT_PERSISTED, text, disruption=True),)
    return ()


def _stopped(world: World) -> bool:
    """Return whether every rank returned 0 or every pod succeeded, and every commit is recorded."""
    state = world.coordinator
    finished = state is not None and state.finished
    return (finished or _all_ended(world)) and everything_recorded(world)


def _all_ended(world: World) -> bool:
    pods = [m.pod for m in world.members]
    return bool(pods) and all(p is not None and p.phase is PodPhase.SUCCEEDED for p in pods)


def _unsaved(world: World) -> bool:
    """Return whether the newest committed step is not in the store.

    For a gang that has stopped, this means that its uploads were abandoned.
    """
    state, persisted = world.coordinator, stored(world)
    local = None if state is None or state.last_local is None else state.last_local.step
    known = [s for s in (local, readable.recorded_commit(world)) if s is not None]
    return bool(known) and (persisted is None or persisted.step < max(known))


def must_stop(world: World) -> bool:
    """Return whether the gang trains and has to save and stop, for a suspension or a resize."""
    spec = world.observed.job.spec
    wanted = spec.store is not None if spec.suspend else may_resize(world)
    return wanted and trains(world)


def request_stop(world: World, *, job_is_over: bool = False) -> list[Action]:
    """Return the request to save and stop for the coordinator, if its pod has an address."""
    coordinator = world.coordinator_member()
    if coordinator is None or coordinator.pod is None or coordinator.pod.ip is None:
        return []
    token = "end" if job_is_over else f"suspend-{world.observed.job.generation}"
    path = CallPath.END if job_is_over else CallPath.STOP
    pod, message = coordinator.pod, GangRequest(world.round, token)
    return [Call(path, coordinator.worker, pod.peer_name, pod.uid, message)]


def delete_all_pods(world: World) -> list[Action]:
    """Return deletes of all pods, except those of a round above the status."""
    return [
        Delete(kinds.POD, p.name, p.uid, "the job is suspended", world.observed.node_lost(p))
        for p in world.observed.pods
        if (not p.terminating or world.observed.node_lost(p)) and not world.is_ahead(p)
    ]
