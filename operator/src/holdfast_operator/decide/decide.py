"""Decide what one pass does about one job. Pure: no clock, no I/O, no randomness.

The rules apply in this order, and the first that fits decides the pass:
 1. The job is being deleted.
 2. A pod of the job cannot be parsed: the pass only reports it.
 3. The job is over.
 4. The job is suspended and stays so or resumes, or it can be suspended immediately.
 5. The job has no round yet: acceptance and the first round (CAS 1).
 6. activeDeadlineSeconds has passed: the job fails.
 7. Failures: a new round (CAS 1), a wait, or the end of the job.
 8. Completion, or suspension after the gang has saved and stopped.
 9. The round has no restore point: choose it (CAS 2), or seal survivors and create pods until it can be.
10. Seals, pods, ROUND, Checkpoint objects, and one status write if it is due.
A pass that begins a round or chooses its restore point only emits Events besides. No pass writes the status
more than once.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import (
    GoodputStatus,
    JobCondition,
    LineageEntry,
    PersistedStep,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_operator.decide import (
    acceptance,
    avoidance,
    checkpoints,
    gang,
    lifecycle,
    releases,
    restore_point,
)
from holdfast_operator.decide.facts import failure, times
from holdfast_operator.decide.facts.failure import CANNOT_START, Failure
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report import readability, recovery
from holdfast_operator.decide.report.notices import with_notices
from holdfast_operator.decide.report.silence import silent_peer, with_silence
from holdfast_operator.decide.report.status import (
    Note,
    after_write,
    compute_phase,
    must_write,
    refresh,
    set_condition,
    with_ratio,
)
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    ChooseRestorePoint,
    CommitPersisted,
    Decision,
    EmitEvent,
    EventKind,
    WriteStatus,
)
from holdfast_operator.model.job import JobMemory, Now, Observed, PodPhase
from holdfast_operator.model.reasons import Reason

__all__ = ["decide"]

STARTING_SECONDS = 0.5
"""Shortest pause between passes while a round starts. Each pass repeats seals and ROUND until they are
acknowledged."""
ANSWER_SECONDS = 0.1
"""Shortest pause between passes while sidecars are called. A healthy sidecar answers within this time."""
PEERS_ANSWER_SECONDS = 3.0
"""Wait for the answers of sidecars before the status reports it."""
RUNNING_SECONDS = 5.0
"""Pause between passes while the gang trains."""
WAITING_SECONDS = 10.0
"""Pause between passes of a job that waits for something outside the gang: a store, a scheduler, a user."""


def decide(observed: Observed, now: Now) -> Decision:
    """Return the actions of one pass over one job, and the memory for the next pass."""
    return with_notices(_decide(observed, now), observed.job.status)


def _decide(observed: Observed, now: Now) -> Decision:
    world = World(observed)
    memory = times.advance(world, now)
    job = observed.job
    if job.deleting:
        freed = releases.release_all(world, "the job is being deleted")
        return Decision(tuple(freed), None, "the job is being deleted", memory)
    readable = readability.plan(world, memory, now)
    if readable is not None:
        return readable
    if lifecycle.is_over(job.status):
        return _over(world, memory, now)
    if job.status.is_true(JobCondition.SUSPENDED) or (
        job.spec.suspend and lifecycle.may_suspend_now(world)
    ):
        return _suspended(world, memory, now)
    if job.status.restart_round is None:
        return _first_round(world, memory, now)
    deadline = lifecycle.deadline_passed(world, now)
    if deadline is not None:
        return _fail(world, memory, now, deadline)
    failures = failure.find_failures(world, memory, now) or lifecycle.stopped_for_nothing(world)
    memory = times.with_failure(memory, bool(failures), now)
    if failures and job.spec.suspend and any(f.replace_pod for f in failures):
        return _kept(world, memory, now, failures[0])
    commit = checkpoints.committable(world) if failures else None
    if commit is not None:  # the coordinator of the next round has no record of it
        return _committed(world, memory, now, commit, [], None)
    if failures and not failure.is_disruption(failures):
        peer = silent_peer(world, memory, now)
        if peer is not None:
            return _await_peers(world, memory, now, failures[0], peer)
    if failures:
        left = failure.gather_seconds(world, failures, memory, now)
        if left > 0:
            text = f"{failures[0].message}; further pods may be lost with it"
            return Decision((), left, text, memory)
        memory = times.with_cause(memory, now)
        delay = failure.restart_delay_seconds(world, failures, now)
        ends = lifecycle.failure_of_job(world, failures, now) is not None
        if not ends and times.seconds_since(memory.failure_seen_at, now) < delay:
            return _back_off(world, memory, now, failures[0], delay)
        return _restart(world, memory, now, failures)
    done = lifecycle.completed(world, now)
    if done is not None and (not job.spec.suspend or job.spec.store is None):
        event = EmitEvent(EventKind.NORMAL, Reason.COMPLETED, "every rank returned 0")
        return _written(world, memory, now, done, [event], "complete")
    if job.spec.suspend and job.spec.store is not None and lifecycle.stopped_and_saved(world):
        status = lifecycle.suspended(world, now)
        return _written(
            world, memory, now, status, [], ("the gang has stopped and saved: the job is suspended")
        )
    if job.status.restore_point is None:
        return _choose(world, memory, now)
    return _run(world, memory, now)


# --------------------------------------------------------------------------- ends and beginnings


def _over(world: World, memory: JobMemory, now: Now) -> Decision:
    state = world.coordinator
    actions = [
        *checkpoints.expire_requests(world, now),
        *releases.release_all(world, "the job is over"),
        *lifecycle.after_the_end(world, now),
    ]
    acted = None if state is None else state.version
    return Decision(tuple(actions), WAITING_SECONDS, "the job is over", memory, acted)


def _suspended(world: World, memory: JobMemory, now: Now) -> Decision:
    job = world.observed.job
    status = job.status
    generation = job.generation
    if not status.is_true(JobCondition.SUSPENDED):
        status = lifecycle.suspended(world, now)
        return _written(world, memory, now, status, [], "the job is suspended without a save")
    if lifecycle.must_withdraw(world):
        status = lifecycle.withdrawn(world, now)
        return _written(world, memory, now, status, [], "the suspension is withdrawn")
    if job.spec.suspend:
        acted = None if world.coordinator is None else world.coordinator.version
        freed = releases.release_all(world, "the job is suspended")
        actions = (*lifecycle.delete_all_pods(world), *freed)
        return Decision(actions, WAITING_SECONDS, "suspended", memory, acted)
    if status.restart_round is None:
        note = Note(Reason.RESUMED, "spec.suspend is false")
        status = set_condition(status, JobCondition.SUSPENDED, False, note, now, generation)
        return _written(world, memory, now, status, [], "the job is resumed")
    status = gang.resumed_round(world, now)
    event = EmitEvent(EventKind.NORMAL, Reason.RESUMED, f"round {status.restart_round} begins")
    return _begun(world, memory, now, status, (), event)


def _first_round(world: World, memory: JobMemory, now: Now) -> Decision:
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
        decision = _written(world, memory, now, status, events, problem.message)
        return replace(decision, requeue_after_seconds=WAITING_SECONDS)
    begun = gang.first_round(World(_with_status(world, status)), now)
    event = EmitEvent(EventKind.NORMAL, Reason.ROUND_BEGAN, f"round {begun.restart_round} begins")
    return _begun(world, memory, now, begun, (), event)


def _restart(world: World, memory: JobMemory, now: Now, failures: tuple[Failure, ...]) -> Decision:
    end = lifecycle.failure_of_job(world, failures, now)
    if end is not None:
        return _fail(world, memory, now, end)
    status = gang.next_round(world, failures, now)
    fault = recovery.fault_at(world, failures, memory)
    if status.last_recovery is not None:
        begun = recovery.begun(status.last_recovery, fault, memory, now)
        status = status.with_recovery(begun)
    gone = tuple(f.confirm_gone for f in failures if f.confirm_gone is not None)
    cause = failures[0]
    text = f"round {status.restart_round} begins: {cause.message}"
    event = EmitEvent(EventKind.WARNING, cause.reason, text)
    return _begun(world, memory, now, status, gone, event)


def _back_off(
    world: World, memory: JobMemory, now: Now, cause: Failure, delay_seconds: float
) -> Decision:
    text = f"{cause.message}; the next round begins after {delay_seconds:.0f} s"
    note = Note(Reason.BACKING_OFF, text)
    left = delay_seconds - times.seconds_since(memory.failure_seen_at, now)
    return _with_status_write(world, memory, now, [], note, max(left, STARTING_SECONDS))


def _await_peers(
    world: World, memory: JobMemory, now: Now, cause: Failure, silent: str
) -> Decision:
    """Wait until every sidecar has answered after ranks failed.

    Most answer within milliseconds, so the status reports the wait only after
    PEERS_ANSWER_SECONDS.
    """
    pause = times.again_after(memory.failure_seen_at, ANSWER_SECONDS, now)
    if times.seconds_since(memory.failure_seen_at, now) < PEERS_ANSWER_SECONDS:
        text = f"{cause.message}; every sidecar is called to find out which of them answer"
        return Decision((), pause, text, memory)
    note = Note(Reason.BACKING_OFF, f"{cause.message}; {silent}")
    return _with_status_write(world, memory, now, [], note, pause)


def _kept(world: World, memory: JobMemory, now: Now, cause: Failure) -> Decision:
    """Keep the remaining pods of a gang that lost pods while spec.suspend is true.

    They may hold the newest step, and no pod is created while spec.suspend is true.
    """
    note = Note(cause.reason, f"{cause.message}; no pod is created while spec.suspend is true")
    planned = checkpoints.plan(world, memory, now)
    actions, commit = list(planned.actions), checkpoints.committable(world)
    if commit is not None:
        return _committed(world, planned.memory, now, commit, actions, note)
    return _with_status_write(world, planned.memory, now, actions, note, WAITING_SECONDS)


def _begun(
    world: World,
    memory: JobMemory,
    now: Now,
    status: TrainingJobStatus,
    gone: tuple[str, ...],
    event: EmitEvent,
) -> Decision:
    status = _stamped(world, memory, now, status)
    memory = replace(memory, begins=status.restart_round, begins_at=now.monotonic)
    action = BeginRound(world.observed.job.resource_version, status, gone)
    return Decision((action, event), 0.0, event.message, after_write(memory, world, now))


def _stamped(
    world: World, memory: JobMemory, now: Now, status: TrainingJobStatus
) -> TrainingJobStatus:
    """Bring the status of a new round up to date, without the state of the old round's coordinator."""
    fresh = refresh(World(replace(world.observed, coordinator=None)), now, memory, status)
    return changed(fresh, phase=compute_phase(fresh))


def _fail(world: World, memory: JobMemory, now: Now, note: Note) -> Decision:
    event = EmitEvent(EventKind.WARNING, note.reason, note.message)
    return _written(world, memory, now, lifecycle.failed(world, now, note), [event], note.message)


# --------------------------------------------------------------------------- the round


def _choose(world: World, memory: JobMemory, now: Now) -> Decision:
    choice = restore_point.choose(world, memory, now)
    if isinstance(choice, restore_point.Wait):
        note = _refused(world) or _pod_trouble(world) or choice.note
        actions = gang.member_actions(world)
        pause = times.again_after(memory.round_seen_at, STARTING_SECONDS, now)
        return _with_status_write(world, memory, now, actions, note, pause)
    status = _with_choice(world, choice)
    status = refresh(world, now, memory, status, Note(choice.reason, choice.message))
    kind = EventKind.NORMAL if choice.reason is Reason.RESTORE_POINT_CHOSEN else EventKind.WARNING
    actions = [
        ChooseRestorePoint(world.observed.job.resource_version, status),
        EmitEvent(kind, choice.reason, choice.message),
    ]
    memory = after_write(memory, world, now)
    return Decision(tuple(actions), 0.0, choice.message, memory)


def _with_choice(world: World, choice: restore_point.Chosen) -> TrainingJobStatus:
    """Return the status of CAS 2 with restore point, lineage and coordinator.

    The step and the levels in the status go down to the restore point.
    """
    status = world.status
    point: RestorePointStatus = choice.point
    entry = LineageEntry(
        round=world.round,
        base_step=point.step,
        base_round=point.round,
        base_manifest=point.manifest,
    )
    own = point.step if point.job_uid is None else None
    lost = None
    if status.step is not None:
        lost = max(0, status.step - (own or 0))
    record = status.last_recovery
    if record is not None and record.round == world.round:
        status = status.with_recovery(
            changed(record, lost_steps=lost, restored_step=point.step, sources=point.sources)
        )
    replicated = status.last_replicated_step
    return changed(
        status,
        restore_point=point,
        lineage=restore_point.extend_lineage(status.lineage, entry),
        coordinator=gang.first_coordinator(world),
        step=point.step,
        last_committed_step=own,
        last_replicated_step=None if replicated is None or own is None else min(replicated, own),
        last_memory_step=own,
        steps_dropped=0,
        goodput=_less_lost_work(status.goodput, lost, status.step),
    )


def _less_lost_work(
    goodput: GoodputStatus | None, lost: int | None, trained: int | None
) -> GoodputStatus | None:
    """Add the lost steps to the lost work, at the mean training time of a step so far."""
    if goodput is None or not lost or not trained:
        return goodput
    seconds = goodput.training_seconds * lost / trained
    return with_ratio(
        changed(
            goodput,
            lost_work_seconds=min(goodput.lost_work_seconds + seconds, goodput.training_seconds),
        )
    )


def _run(world: World, memory: JobMemory, now: Now) -> Decision:
    job = world.observed.job
    state = world.coordinator
    running = state is not None and state.running
    actions = gang.member_actions(world)
    rounds = gang.round_actions(world, memory, now)
    actions.extend(rounds.actions)
    planned = checkpoints.plan(world, rounds.memory, now)
    actions.extend(planned.actions)
    memory = planned.memory
    if running:
        actions.extend(gang.delete_old_certificates(world))
    if job.spec.suspend and lifecycle.trains(world) and job.spec.store is not None:
        actions.extend(lifecycle.request_stop(world))
    commit = checkpoints.committable(world)
    requeue = RUNNING_SECONDS
    if not (rounds.complete and running):
        requeue = times.again_after(memory.chosen_seen_at, STARTING_SECONDS, now)
    note = None if running else _refused(world) or _pod_trouble(world)
    if note is None and not running and not job.status.is_true(JobCondition.RUNNING):
        note = Note(Reason.STARTING, f"round {world.round}: ranks restore and rendezvous")
    if commit is None:
        return _with_status_write(world, memory, now, actions, note, requeue)
    return _committed(world, memory, now, commit, actions, note)


def _committed(
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
    status = refresh(world, now, memory, _with_suspend_note(world, now, status), note)
    text = f"step {commit.step} of round {commit.round} is persisted"
    first: list[Action] = [CommitPersisted(job.resource_version, status)]
    event = EmitEvent(EventKind.NORMAL, Reason.PERSISTED, text)
    memory = after_write(memory, world, now)
    return Decision((*first, *actions, event), 0.0, text, memory, _acted(world))


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
    if lifecycle.stop_requested(job.status):
        note = replace(note, reason=Reason.STOPPING)
    return set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)


def _refused(world: World) -> Note | None:
    """Return a note with the error of a create that was refused in an earlier pass, or None."""
    text = world.observed.memory.create_refused
    return Note(Reason.CREATE_REFUSED, text) if text else None


def _pod_trouble(world: World) -> Note | None:
    """Return why a pod is not created or does not start, or None.

    The note contains the problem of the spec, or the message of the kubelet or the scheduler.
    """
    refused = acceptance.birth_problem(world)
    if refused is not None and any(member.pod is None for member in world.members):
        return refused
    for member in world.members:
        pod = member.pod
        if pod is not None and pod.waiting_reason in CANNOT_START:
            text = f"pod {pod.name}: {pod.waiting_reason}: {pod.waiting_message}"
            return Note(Reason.CONTAINER_CANNOT_START, text)
    waiting = avoidance.waiting_note(world)
    if waiting is not None:
        return waiting
    for member in world.members:
        pod = member.pod
        if pod is not None and pod.phase is PodPhase.PENDING and pod.node is None:
            text = f"pod {pod.name} is not scheduled: {pod.message}".rstrip(": ")
            return Note(Reason.WAITING_FOR_PODS, text)
    return None


# --------------------------------------------------------------------------- writing


def _with_status_write(
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
    actions = [*actions, *releases.overdue(world, memory, now)]
    job = world.observed.job
    status = _with_suspend_note(world, now, job.status)
    status = lifecycle.accepted(World(_with_status(world, status)), now, None)
    status = with_silence(refresh(world, now, memory, status, note), world, now)
    reason = note.message if note is not None else f"round {world.round} runs"
    if must_write(job.status, status, memory, now):
        actions = [WriteStatus(job.resource_version, _renamed(world, now, status)), *actions]
        memory = after_write(memory, world, now)
    elif _renamed(world, now, status).coordinator != job.status.coordinator:
        actions = [WriteStatus(job.resource_version, _renamed(world, now, status)), *actions]
    return Decision(tuple(actions), requeue_seconds, reason, memory, _acted(world))


def _renamed(world: World, now: Now, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with another coordinator if the present one does not answer."""
    other = gang.renamed_coordinator(world, now)
    return status if other is None else changed(status, coordinator=other)


def _written(
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
    return Decision((write, *others), 0.0, reason, memory, _acted(world))


def _with_status(world: World, status: TrainingJobStatus) -> Observed:
    return replace(world.observed, job=changed(world.observed.job, status=status))


def _acted(world: World) -> int | None:
    """Return the version of the coordinator's state up to which the API has a record of everything, or None.

    The coordinator releases Finish when it receives the version. So for a gang that has finished the result
    is None until the status records the end of the job or its suspension (`_over`, `_suspended`).
    """
    state = world.coordinator
    if state is None or state.finished or not lifecycle.everything_recorded(world):
        return None
    return state.version
