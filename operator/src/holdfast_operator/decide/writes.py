"""Decisions that write the status of a job, each with at most one write. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_core.api import JobCondition, PersistedStep, TrainingJobStatus, changed
from holdfast_operator.decide import checkpoints, ends, gang, lifecycle
from holdfast_operator.decide.facts.sizes import with_missing_workers, with_resizing
from holdfast_operator.decide.facts.spec import accepted
from holdfast_operator.decide.facts.world import Note, World, asked_for
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.conditions import with_silence
from holdfast_operator.decide.report.status import must_write, refresh, remember_write
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    CommitPersisted,
    Decision,
    EmitEvent,
    WriteStatus,
    normal,
    warning,
)
from holdfast_operator.model.reasons import Reason

STARTING_SECONDS = 0.5
"""Shortest pause between passes while a round starts. Each pass repeats seals and ROUND until they are
acknowledged."""
WAITING_SECONDS = 10.0
"""Pause between passes of a job that waits for something outside the gang: a store, a scheduler, a user."""


def with_status_write(
    world: World, actions: Sequence[Action], note: Note | None, requeue_seconds: float
) -> Decision:
    """Return a decision with these actions, overdue releases of Checkpoints and, if due, a status write.

    `note` is the reason and message of condition Running=False. A replaced coordinator makes a write due.
    """
    job = world.job
    actions = [*actions, *ends.overdue(world)]
    status = _with_suspend_note(world, job.status)
    status = accepted(world.with_status(status), None)
    status = with_silence(_refreshed(status, world, note), world)
    coordinated = renamed(world, status)
    due = must_write(world, status)
    if due or coordinated.coordinator != job.status.coordinator:
        actions.append(WriteStatus(job.resource_version, coordinated))
    if due:
        remember_write(world)
    reason = note.message if note is not None else f"round {world.round} runs"
    return Decision.of(actions, requeue_seconds, reason, _acted(world))


def _refreshed(status: TrainingJobStatus, world: World, note: Note | None) -> TrainingJobStatus:
    """Return the status with what is observed of a gang that may change its number of workers."""
    status = with_resizing(refresh(world, status, note), world)
    return with_missing_workers(status, world)


def written(
    world: World, status: TrainingJobStatus, others: Sequence[Action], reason: str
) -> Decision:
    """Return a decision with a status write and these other actions (Events)."""
    status = with_silence(refresh(world, status), world)
    remember_write(world)
    write = WriteStatus(world.job.resource_version, status)
    return Decision.of((write, *others), 0.0, reason, _acted(world))


def committed(
    world: World, commit: PersistedStep, actions: Sequence[Action], note: Note | None
) -> Decision:
    """Return a decision that commits in the object tier and then takes these actions."""
    status = changed(world.job.status, last_persisted=commit)
    status = _refreshed(_with_suspend_note(world, status), world, note)
    remember_write(world)
    event = persisted(commit)
    write = CommitPersisted(world.job.resource_version, status)
    return Decision.of((write, *actions, event), 0.0, event.message, _acted(world))


def persisted(commit: PersistedStep) -> EmitEvent:
    text = f"step {commit.step} of round {commit.round} is persisted"
    return normal(Reason.PERSISTED, text)


def begin_round(
    world: World, status: TrainingJobStatus, event: EmitEvent, gone: tuple[str, ...] = ()
) -> Decision:
    """Return the decision that begins the round of this status (CAS 1), or takes more pods into it.

    The recovery of the round before is interrupted if it is not complete.
    """
    status = recovery.interrupted(status, world)
    # The coordinator of the round before says nothing about this round.
    silent = World(replace(world.observed, coordinator=None), world.now)
    silent.memory = world.memory
    status = refresh(silent, status)
    if status.restart_round is not None and status.restart_round != world.memory.round:
        begun = {**world.memory.begun, status.restart_round: world.now.monotonic}
        world.remember(begun=begun)
    remember_write(world)
    action = BeginRound(world.job.resource_version, status, gone)
    return Decision.of((action, event), 0.0, event.message)


def fail_job(world: World, note: Note) -> Decision:
    """Return the decision that ends the job as failed, and says whether its pods stay.

    The Checkpoint object of the newest commit is created before, because it is not created after the end.
    """
    records = checkpoints.records(world)
    if records and not world.memory.record_refused:
        return Decision.of(records, 0.0, "the newest commit is recorded")
    event = warning(note.reason, note.message)
    status = recovery.interrupted(lifecycle.failed(world, note), world)
    status = ends.with_pods_kept(status, world, ends.why_kept(world))
    return written(world, status, [*records, event], note.message)


def _with_suspend_note(world: World, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with condition Suspended=False, whose message is what a suspension waits for.

    A job that was never asked to suspend does not get the condition.
    """
    if not world.spec.suspend:
        if status.condition(JobCondition.SUSPENDED) is None:
            return status
        note = Note(Reason.NOT_SUSPENDED, "spec.suspend is false")
    else:
        note = lifecycle.suspend_note(world)
    if asked_for(world.job.status, JobCondition.SUSPENDED):
        note = note._replace(reason=Reason.STOPPING)
    return world.with_condition(status, JobCondition.SUSPENDED, False, *note)


def renamed(world: World, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with another coordinator if the present one does not answer."""
    other = gang.renamed_coordinator(world)
    return status if other is None else changed(status, coordinator=other)


def _acted(world: World) -> int | None:
    """Return the version of the coordinator's state up to which the API has a record of everything, or None.

    The coordinator releases Finish when it receives the version. So for a gang that has finished the result
    is None until the status records the end of the job or its suspension (`over`, `suspended`).
    """
    state = world.coordinator
    if state is None or state.finished or not checkpoints.everything_recorded(world):
        return None
    return state.version
