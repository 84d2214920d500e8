"""Decisions that write the status of a job, each with at most one write. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition, PersistedStep, TrainingJobStatus, changed
from holdfast_core.api import with_status as job_with_status
from holdfast_operator.decide import checkpoints, ends, gang, lifecycle, recovery
from holdfast_operator.decide.conditions import with_silence
from holdfast_operator.decide.sizes import with_missing_workers, with_resizing
from holdfast_operator.decide.spec import accepted
from holdfast_operator.decide.status import after_write, compute_phase, must_write, refresh
from holdfast_operator.decide.world import Note, World, asked_for, set_condition
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    CommitPersisted,
    Decision,
    EmitEvent,
    EventKind,
    WriteStatus,
)
from holdfast_operator.model.job import JobMemory, Now, Observed
from holdfast_operator.model.reasons import Reason

STARTING_SECONDS = 0.5
"""Shortest pause between passes while a round starts. Each pass repeats seals and ROUND until they are
acknowledged."""
WAITING_SECONDS = 10.0
"""Pause between passes of a job that waits for something outside the gang: a store, a scheduler, a user."""


def with_status_write(
    world: World,
    memory: JobMemory,
    now: Now,
    actions: list[Action],
    note: Note | None,
    requeue_seconds: float,
) -> Decision:
    """Return a decision with these actions, overdue releases of Checkpoints and, if due, a status write.

    `note` is the reason and message of condition Running=False. A replaced coordinator makes a write due.
    """
    actions = [*actions, *ends.overdue(world, memory, now)]
    job = world.observed.job
    status = _with_suspend_note(world, now, job.status)
    status = accepted(World(with_status(world, status)), now, None)
    status = _refreshed(status, world, memory, now, note)
    status = with_silence(status, world, now)
    reason = note.message if note is not None else f"round {world.round} runs"
    if must_write(job.status, status, memory, now, world.observed.routine_seconds):
        actions = [WriteStatus(job.resource_version, renamed(world, now, status)), *actions]
        memory = after_write(memory, world, now)
    elif renamed(world, now, status).coordinator != job.status.coordinator:
        actions = [WriteStatus(job.resource_version, renamed(world, now, status)), *actions]
    return Decision.of(actions, requeue_seconds, reason, memory, _acted(world))


def _refreshed(
    status: TrainingJobStatus, world: World, memory: JobMemory, now: Now, note: Note | None
) -> TrainingJobStatus:
    """Return the status with what is observed of a gang that may change its number of workers."""
    status = with_resizing(refresh(world, now, memory, status, note), world, now)
    return with_missing_workers(status, world, memory, now)


def written(
    world: World,
    memory: JobMemory,
    now: Now,
    status: TrainingJobStatus,
    others: list[Action],
    reason: str,
) -> Decision:
    """Return a decision with a status write and these other actions (Events)."""
    status = with_silence(refresh(world, now, memory, status), world, now)
    write = WriteStatus(world.observed.job.resource_version, status)
    memory = after_write(memory, world, now)
    return Decision.of((write, *others), 0.0, reason, memory, _acted(world))


def committed(
    world: World,
    memory: JobMemory,
    now: Now,
    commit: PersistedStep,
    actions: list[Action],
    note: Note | None,
) -> Decision:
    """Return a decision that commits in the object tier and then takes these actions."""
    job = world.observed.job
    status = changed(job.status, last_persisted=commit)
    status = _refreshed(_with_suspend_note(world, now, status), world, memory, now, note)
    text = f"step {commit.step} of round {commit.round} is persisted"
    first: list[Action] = [CommitPersisted(job.resource_version, status)]
    event = EmitEvent(EventKind.NORMAL, Reason.PERSISTED, text)
    memory = after_write(memory, world, now)
    return Decision.of((*first, *actions, event), 0.0, text, memory, _acted(world))


def begin_round(
    world: World,
    memory: JobMemory,
    now: Now,
    status: TrainingJobStatus,
    gone: tuple[str, ...],
    event: EmitEvent,
) -> Decision:
    status = _stamped(world, memory, now, status)
    if status.restart_round is not None and status.restart_round != memory.round:
        memory = replace(memory, begun={**memory.begun, status.restart_round: now.monotonic})
    action = BeginRound(world.observed.job.resource_version, status, gone)
    return Decision.of((action, event), 0.0, event.message, after_write(memory, world, now))


def fail_job(world: World, memory: JobMemory, now: Now, note: Note) -> Decision:
    """Return the decision that ends the job as failed, and says whether its pods stay.

    The Checkpoint object of the newest commit is created before, because it is not created after the end.
    """
    records = checkpoints.records(world, now)
    if records and not memory.record_refused:
        return Decision.of(records, 0.0, "the newest commit is recorded", memory)
    event = EmitEvent(EventKind.WARNING, note.reason, note.message)
    status = recovery.interrupted(lifecycle.failed(world, now, note), memory)
    status = ends.with_pods_kept(status, world, ends.why_kept(world), now)
    return written(world, memory, now, status, [*records, event], note.message)


def _stamped(
    world: World, memory: JobMemory, now: Now, status: TrainingJobStatus
) -> TrainingJobStatus:
    """Bring the status of a new round up to date, without the state of the old round's coordinator."""
    fresh = refresh(World(replace(world.observed, coordinator=None)), now, memory, status)
    return changed(fresh, phase=compute_phase(fresh))


def _with_suspend_note(world: World, now: Now, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with condition Suspended=False, whose message is what a suspension waits for.

    A job that was never asked to suspend does not get the condition.
    """
    job = world.observed.job
    if not job.spec.suspend:
        if status.condition(JobCondition.SUSPENDED) is None:
            return status
        note = Note(Reason.NOT_SUSPENDED, "spec.suspend is false")
    else:
        note = lifecycle.suspend_note(world)
    if asked_for(job.status, JobCondition.SUSPENDED):
        note = replace(note, reason=Reason.STOPPING)
    return set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)


def renamed(world: World, now: Now, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with another coordinator if the present one does not answer."""
    other = gang.renamed_coordinator(world, now)
    return status if other is None else changed(status, coordinator=other)


def with_status(world: World, status: TrainingJobStatus) -> Observed:
    return replace(world.observed, job=job_with_status(world.observed.job, status))


def _acted(world: World) -> int | None:
    """Return the version of the coordinator's state up to which the API has a record of everything, or None.

    The coordinator releases Finish when it receives the version. So for a gang that has finished the result
    is None until the status records the end of the job or its suspension (`over`, `suspended`).
    """
    state = world.coordinator
    if state is None or state.finished or not checkpoints.everything_recorded(world):
        return None
    return state.version
