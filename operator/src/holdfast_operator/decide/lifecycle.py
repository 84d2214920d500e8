"""Whether and how a job ends, is suspended, or saves and stops. Pure.

A rule that does not apply returns None.
"""

from __future__ import annotations

import math

from holdfast_core.api import JobCondition, TrainingJobStatus, changed
from holdfast_core.messages.schema import GangRequest
from holdfast_operator.decide.checkpoints import everything_recorded, pending_commit
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.evidence import Failure
from holdfast_operator.decide.facts.sizes import may_resize
from holdfast_operator.decide.facts.world import (
    Note,
    World,
    all_ended,
    asked_for,
    stop_requested,
    trains,
)
from holdfast_operator.model.actions import Action, CallPath, Delete
from holdfast_operator.model.job import PodPhase, PodView, Seen
from holdfast_operator.model.reasons import Reason

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


# --------------------------------------------------------------------------- the end


def _ended(
    status: TrainingJobStatus, world: World, end: JobCondition, note: Note
) -> TrainingJobStatus:
    """Return the status with this end of the gang. The conditions of its work are false from now on."""
    for kind in _UNTIL_THE_END:
        if status.condition(kind) is not None:
            status = world.with_condition(status, kind, False, *note)
    return world.with_condition(status, end, True, *note)


def failed(world: World, note: Note) -> TrainingJobStatus:
    """Return the status that ends the job as failed."""
    status = changed(world.status, completion_time=world.now.utc)
    return _ended(status, world, JobCondition.FAILED, note)


def deadline_passed(world: World) -> Note | None:
    """Return the reason for failure if activeDeadlineSeconds has passed, else None."""
    if seconds_to_deadline(world) > 0:
        return None
    seconds = world.spec.active_deadline_seconds
    return Note(Reason.DEADLINE_EXCEEDED, f"activeDeadlineSeconds {seconds} has passed")


def seconds_to_deadline(world: World) -> float:
    """Return the time until activeDeadlineSeconds have passed; infinite without a deadline or a start."""
    start = world.status.start_time
    seconds = world.spec.active_deadline_seconds
    if seconds is None or start is None:
        return math.inf
    return seconds - world.now.elapsed_seconds(start)


def completed(world: World) -> TrainingJobStatus | None:
    """Return the status that completes the job, or None if it is not complete.

    A job is complete when every rank returned 0 or every pod succeeded, and every commit in the store is
    recorded. Ranks that stop for a drain return 0 as well, so while the pod of a member is being deleted the
    returns of the ranks do not count. A gang that was asked to stop does not complete the job either
    (stopped_for_nothing).
    """
    status = world.status
    if stop_requested(status):
        return None
    finished = (
        world.state.finished
        and status.restore_point is not None
        and not world.state.dead
        and all(m.pod is not None and not m.pod.terminating for m in world.members)
    )
    if not (finished or all_ended(world)) or not everything_recorded(world):
        return None
    note = Note(Reason.COMPLETED, "every rank returned 0")
    status = changed(status, completion_time=world.now.utc)
    return _ended(status, world, JobCondition.COMPLETE, note)


# --------------------------------------------------------------------------- suspension


def suspended(world: World) -> TrainingJobStatus:
    """Return the status of a suspended job."""
    store, last = world.spec.store, world.status.last_persisted
    kept = "no committed step would be lost with the pods"
    if store is not None and last is not None:
        kept = (
            f"step {last.step} is kept in the CheckpointStore {store}, and the job resumes from it"
        )
    note = Note(Reason.SUSPENDED, f"spec.suspend is true: {kept}")
    # As for a Job of batch/v1, activeDeadlineSeconds counts from zero again when the job resumes.
    # All pods are new after the suspension, so an elastic gang then tries to have all of its workers.
    status = changed(world.status, start_time=None, scheduling=None, elastic=None)
    return _ended(status, world, JobCondition.SUSPENDED, note)


def may_suspend_now(world: World) -> bool:
    """Return whether all pods can be deleted now without the loss of a committed step.

    A gang that trains is asked to save first if the job has an object store.
    """
    if world.status.restart_round is None:
        return True
    stored = world.spec.store is not None
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


def withdrawn(world: World) -> TrainingJobStatus:
    """Return the status that withdraws a suspension before a pod was deleted. The round continues."""
    note = suspend_note(world)
    if world.spec.store is not None:
        # The gang may have been asked to stop before it was suspended: this reason records it.
        note = note._replace(reason=Reason.STOPPING)
    status = changed(world.status, start_time=world.now.utc)
    return world.with_condition(status, JobCondition.SUSPENDED, False, *note)


def suspend_note(world: World) -> Note:
    """Return why a job whose spec.suspend is true is not suspended yet.

    The gang is asked to stop exactly if the reason is STOPPING.
    """
    lost = readable.lost_with_all_pods(world)
    if world.spec.store is None:
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


def stopped_and_saved(world: World) -> bool:
    """Return whether the gang has stopped, and its newest committed step is in the object store."""
    return _stopped(world) and not _unsaved(world)


def stopped_for_nothing(world: World) -> tuple[Failure, ...]:
    """Return a failure if the gang stopped for a suspension or a resize and must start again in its pods.

    Either the stop is no longer wanted, or the newest step did not reach the store.
    """
    if not stop_requested(world.status) or not _stopped(world):
        return ()
    if not world.spec.suspend and not may_resize(world):
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
    return (world.state.finished or all_ended(world)) and everything_recorded(world)


def _unsaved(world: World) -> bool:
    """Return whether the newest committed step is not in the store.

    For a gang that has stopped, this means that its uploads were abandoned.
    """
    persisted = readable.stored(world)
    known = [s for s in (world.local_step, readable.recorded_commit(world)) if s is not None]
    return bool(known) and (persisted is None or persisted.step < max(known))


def must_stop(world: World) -> bool:
    """Return whether the gang trains and has to save and stop, for a suspension or a resize."""
    spec = world.spec
    wanted = spec.store is not None if spec.suspend else may_resize(world)
    return wanted and trains(world)


def request_stop(world: World, *, job_is_over: bool = False) -> list[Action]:
    """Return the request to save and stop for the coordinator, if its pod has an address."""
    token = "end" if job_is_over else f"suspend-{world.job.generation}"
    path = CallPath.END if job_is_over else CallPath.STOP
    return [*world.call_coordinator(path, GangRequest(world.round, token))]


def delete_all_pods(world: World) -> list[Delete]:
    """Return deletes of all pods, except those of a round above the status."""
    pods = (p for p in world.observed.pods if not world.is_ahead(p))
    return world.deletes(pods, "the job is suspended")


# --------------------------------------------------------------------------- a gang that leaves


KUBELET_SECONDS = 10.0
"""Time after the grace period of a leaving pod in which its kubelet reports that it is gone."""
COORDINATOR_ANSWER_SECONDS = 10.0
"""Time for the coordinator to answer an operator process that finds a pod leaving when it starts. Without it,
the new process would seal a gang that is saving."""


def drains(world: World) -> bool:
    """Return whether the gang is saving and stopping because at least one of its pods leaves."""
    return any(
        m.pod is not None and m.pod.leaving and may_drain(world, m.pod)
        for m in world.members
        if not m.node_lost
    )


def may_drain(world: World, pod: PodView) -> bool:
    """Return whether a leaving pod still has time: its gang saves and stops, and its sidecar flushes.

    If a new round sealed the gang before, the steps since the last save would be lost. A rank that hangs does
    not cost the grace period: its launcher kills it earlier, and the gang then has a dead rank.
    """
    if world.status.restore_point is None or pod.phase is not PodPhase.RUNNING:
        return False
    waited = world.seconds_seen(Seen.LEAVING, pod.uid)
    state = world.coordinator
    if state is None:
        trains = world.status.is_true(JobCondition.RUNNING)
        return trains and waited < COORDINATOR_ANSWER_SECONDS
    if not state.running or state.finished or state.dead or _has_left(world, pod):
        return False
    return waited < pod.grace_seconds + KUBELET_SECONDS


def _has_left(world: World, pod: PodView) -> bool:
    """Return whether the trainer has ended and other pods have copies of the newest step.

    The round then begins before the kubelet reports that the pod is gone. If several pods leave, or another
    one is gone, the copies may have been there.
    """
    progress = world.state.progress
    return (
        pod.trainer_exit_code is not None
        and world.copies > 0
        and len(world.pods) == len(world.members)
        and sum(p.leaving for p in world.pods) == 1
        and progress is not None
        and world.copied_step == progress.last
    )
