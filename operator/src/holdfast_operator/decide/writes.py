"""Decisions that write the status of a job: rounds that begin (CAS 1), commits, and all others. Pure.

Each has at most one write. CAS 1 is the fence: it is durable before the round has any other effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from holdfast_core.api import (
    ElasticStatus,
    JobCondition,
    PersistedStep,
    RecoveryStatus,
    ResizeStatus,
    RestartRecord,
    SchedulingStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.api.base import stamp
from holdfast_core.api.training_job_status import MAX_NAMED_WORKERS
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import first_of
from holdfast_operator.decide import checkpoints, ends, gang
from holdfast_operator.decide.facts import rollback, scheduling, sizes
from holdfast_operator.decide.facts.evidence import (
    Failure,
    Ruling,
    kept_restarts,
    with_evidence,
    with_restart,
)
from holdfast_operator.decide.facts.nodes import (
    with_new_spares,
    with_node_failures,
    with_promotions,
    workers_to_move,
)
from holdfast_operator.decide.facts.readable import LOST_LINEAGE, with_missing_restore_point
from holdfast_operator.decide.facts.rollback import with_trained
from holdfast_operator.decide.facts.sizes import with_missing_workers, with_resizing
from holdfast_operator.decide.facts.spec import accepted, find_problem
from holdfast_operator.decide.facts.world import MemberState, Note, World, asked_for, stop_requested
from holdfast_operator.decide.gang import with_expected_failures
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.conditions import with_hang, with_silence
from holdfast_operator.decide.report.status import must_write, refresh, remember_write, with_levels
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
from holdfast_operator.model.job import Seen
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
        actions.append(WriteStatus(coordinated))
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
    write = WriteStatus(status)
    return Decision.of((write, *others), 0.0, reason, _acted(world))


def committed(
    world: World, commit: PersistedStep, actions: Sequence[Action], note: Note | None
) -> Decision:
    """Return a decision that commits in the object tier and then takes these actions."""
    status = changed(world.job.status, last_persisted=commit)
    status = _refreshed(_with_suspend_note(world, status), world, note)
    remember_write(world)
    event = persisted(commit)
    write = CommitPersisted(status)
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
    action = BeginRound(status, gone)
    return Decision.of((action, event), 0.0, event.message)


def fail_job(world: World, note: Note) -> Decision:
    """Return the decision that ends the job as failed, and says whether its pods stay.

    The Checkpoint object of the newest commit is created before, because it is not created after the end.
    """
    records = checkpoints.records(world)
    if records and not world.memory.record_refused:
        # The watch shows the object and requests the pass. While it lags, each pass would ask for it again.
        return Decision.of(records, STARTING_SECONDS, "the newest commit is recorded")
    event = warning(note.reason, note.message)
    status = recovery.interrupted(ends.failed(world, note), world)
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
        note = ends.suspend_note(world)
    if asked_for(world.job.status, JobCondition.SUSPENDED):
        note = note._replace(reason=Reason.STOPPING)
    return world.with_condition(status, JobCondition.SUSPENDED, False, *note)


def renamed(world: World, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status with another coordinator if the present one does not answer."""
    other = gang.renamed_coordinator(world)
    return status if other is None else changed(status, coordinator=other)


def _acted(world: World) -> int | None:
    """Return the version of the coordinator's state up to which the API has a record of everything, or None.

    The coordinator releases the pods when it receives the version. So for a gang that has finished the result
    is None until the status records the end of the job or its suspension (`over`, `suspended`).
    """
    state = world.coordinator
    if state is None or state.finished or not checkpoints.everything_recorded(world):
        return None
    return state.version


# --------------------------------------------------------------------------- rounds that begin


def _begun(
    status: TrainingJobStatus,
    world: World,
    members: tuple[RestartRound, ...],
    note: Note,
    **changes: Any,
) -> TrainingJobStatus:
    """Return what every round begins with: the status without what belongs to the round before.

    Args:
        note: Why the gang of the round before does not stop any more if it was asked to.
        changes: Further fields of the status.
    """
    for kind, value in ((JobCondition.SUSPENDED, False), (JobCondition.RESIZING, True)):
        if asked_for(status, kind):
            status = world.with_condition(status, kind, value, *note)
    status = changed(
        status,
        restart_round=world.next_round,
        members=members,
        restore_point=None,
        coordinator=None,
        **changes,
    )
    status = with_expected_failures(with_trained(status, world), world)
    return world.with_condition(status, JobCondition.RUNNING, False, *note)


def next_round(world: World, ruling: Ruling) -> TrainingJobStatus:
    """Return the status that begins the next round after the failures of this ruling."""
    round_, cause = world.next_round, ruling.failures[0]
    status = with_node_failures(with_levels(world.status, world), world, ruling)
    gone = {f.worker for f in ruling.failures if f.replace_pod}
    gone |= workers_to_move(world, status, ruling, gone)
    recent = kept_restarts(world)
    if not ruling.disruption:
        # A failure that the user expects is no evidence against the checkpoint.
        failed_from = None if ruling.ignored else ruling.failed_from
        record = RestartRecord(
            round=round_, at=world.now.utc, ignored=ruling.ignored, failed_from=failed_from
        )
        recent = with_restart(recent, record)
        status = with_evidence(status, world, recent)
    if cause.reason is Reason.STATUS_BEHIND and not status.lineage:
        # The gang may have trained, as before a first round that finds traces of it.
        status = changed(status, lineage=LOST_LINEAGE)
    if cause.reason is Reason.CHECKPOINT_MISSING:
        status = with_missing_restore_point(status)
    note = Note(cause.reason, f"round {round_}: {ruling.text}")
    status = _begun(
        status,
        world,
        _members(world, gone, round_),
        note,
        restarts=status.restarts + 1,
        recent_restarts=recent,
    )
    if cause.reason is Reason.HUNG:
        status = with_hang(status, world, cause.message)
    status = with_promotions(status, world)
    status = status.with_recovery(_recovery(world, round_, ruling.failures))
    return world.with_condition(status, JobCondition.RESTARTING, True, *note)


def _members(
    world: World, gone: AbstractSet[Worker | None], round_: RestartRound
) -> tuple[RestartRound, ...]:
    """Return the birth rounds of a round's members, in which the pods of the workers in `gone` are new.

    A pod on a lost node stays a member unless a failure says that it may be replaced.
    """
    newer = world.pods_ahead
    return tuple(
        newer.get(m.worker) or (m.birth_round if _stays(m) and m.worker not in gone else round_)
        for m in world.members
    )


def with_taken_in(world: World, ruling: Ruling, reason: str) -> TrainingJobStatus:
    """Return the status of the present round, which also replaces the pods of these failures (ADR 0008).

    Args:
        reason: The first cause of the round and of these failures.
    """
    round_ = world.round
    status = with_node_failures(world.status, world, ruling)
    gone = {f.worker for f in ruling.failures}
    found = _recovery(world, round_, ruling.failures)
    record = status.last_recovery
    if record is not None and record.round == round_:
        both = dict.fromkeys((*record.workers, *found.workers))
        status = status.with_recovery(
            changed(
                record,
                reason=reason,
                workers=tuple(sorted(both))[:MAX_NAMED_WORKERS],
                nodes=tuple(sorted({*record.nodes, *found.nodes})[:MAX_NAMED_WORKERS]),
            )
        )
    status = with_promotions(changed(status, members=_members(world, gone, round_)), world)
    note = Note(ruling.failures[0].reason, f"round {round_}: {ruling.text}")
    return world.with_condition(status, JobCondition.RESTARTING, True, *note)


def _recovery(world: World, round_: RestartRound, failures: tuple[Failure, ...]) -> RecoveryStatus:
    """Return the record of the recovery from these failures, with the workers that caused it."""
    cause = failures[0]
    failed = {f.worker for f in failures if f.disruption == cause.disruption}
    if cause.disruption:  # a pod whose gang could not save is replaced in the same round
        failed |= {m.worker for m in world.members if m.pod is not None and m.pod.terminating}
    # A sidecar names the workers of dead ranks, and may name one that does not exist.
    members = [m for m in world.members if m.worker in failed][:MAX_NAMED_WORKERS]
    workers = tuple(m.worker for m in members)
    pods = (m.pod for m in members)
    nodes = {pod.node for pod in pods if pod is not None and pod.node is not None}
    return RecoveryStatus(
        round=round_, reason=cause.reason, workers=workers, nodes=tuple(sorted(nodes))
    )


def _stays(member: MemberState) -> bool:
    """Return whether a member keeps its pod in the next round.

    A pod that is not bound to a node is replaced: it holds nothing, and under its old name it could be
    created again only in its own round.
    """
    return member.pod is not None and member.pod.alive and member.pod.node is not None


def _with_new_pods(world: World, workers: int, note: Note, **changes: Any) -> TrainingJobStatus:
    """Return the status that begins a round in which all pods are new, the spares among them."""
    status = with_levels(world.status, world)
    status = _begun(status, world, (world.next_round,) * workers, note, **changes)
    return with_new_spares(status, world)


def _resized(
    world: World, workers: int, record: ResizeStatus | None, note: Note
) -> TrainingJobStatus:
    """Return the status that begins a round with another number of workers. All of its pods are new.

    The newest committed step must be in the object store, if there is one.
    """
    elastic = sizes.elastic_record(world.job, workers)
    status = _with_new_pods(world, workers, note, resize=record, elastic=elastic, scheduling=None)
    status = _with_recovery(status, world, note)
    return world.with_condition(status, JobCondition.RESIZING, True, *note)


def _with_recovery(status: TrainingJobStatus, world: World, note: Note) -> TrainingJobStatus:
    """Return the status with a record of the recovery of its round, which no failure caused."""
    begun = RecoveryStatus(round=world.next_round, reason=note.reason, begun_at=world.now.utc)
    return status.with_recovery(begun)


# --------------------------------------------------------------------------- passes


GATHER_ROOM_SECONDS = 30.0
"""Time for which a gang that found a node waits for nodes for its other missing workers. Each growth costs a
save and a restart."""


def first_round(world: World) -> Decision:
    job = world.job
    problem = find_problem(world)
    status = accepted(world, problem)
    if problem is not None:
        old = job.status.condition(JobCondition.ACCEPTED)
        events: list[Action] = []
        if old is None or old.reason != problem.reason:
            event = normal if problem.reason == Reason.STORE_NOT_PROBED else warning
            events.append(event(*problem))
        same = old is not None and (old.reason, old.message) == (problem.reason, problem.message)
        if same and job.status.observed_generation == job.generation:
            return Decision.of((), WAITING_SECONDS, problem.message)
        decision = written(world, status, events, problem.message)
        return replace(decision, requeue_after_seconds=WAITING_SECONDS)
    round_, newer = world.next_round, world.pods_ahead
    members = tuple(newer.get(Worker(w), round_) for w in range(job.spec.workers))
    note = Note(Reason.ROUND_BEGAN, f"round {round_} begins")
    started_at = status.start_time or world.now.utc
    lineage = job.status.lineage
    if round_ > 0:
        # There are pods or checkpoints of the job, so the status is lost and the gang may have trained. Each
        # of its checkpoints may be restored, and a pod that does not answer may have one.
        lineage = LOST_LINEAGE
    begun = _begun(status, world, members, note, start_time=started_at, lineage=lineage)
    return begin_round(world, with_promotions(begun, world), normal(*note))


def resume(world: World) -> Decision:
    """Return the decision that begins the round after a suspension. All of its pods are new."""
    round_, workers = world.next_round, sizes.next_workers(world)
    note = Note(Reason.RESUMED, f"round {round_}: spec.suspend is false again")
    record, at = sizes.resized(world, workers), world.now.utc
    status = _with_new_pods(world, workers, note, resize=record, start_time=at)
    status = _with_recovery(status, world, note)
    status = world.with_condition(status, JobCondition.SUSPENDED, False, *note)
    event = normal(Reason.RESUMED, f"round {round_} begins")
    return begin_round(world, status, event)


def go_back(world: World, failure: Failure) -> Decision:
    """Begin a round with the number of workers before the resize that failed.

    status.resize must name this number. The failed start counts neither as a restart of the gang nor against
    the checkpoint.
    """
    old, present, round_ = world.status.resize, len(world.members), world.next_round
    assert old is not None
    before = old.from_workers or present
    wanted = world.spec.workers
    record = ResizeStatus(round=round_, refused_workers=present, refused_of_workers=wanted)
    text = f"{sizes.describe_refused(present, before)}. The failure: {failure.message}"
    note = Note(Reason.RESIZE_FAILED, text)
    status = _resized(world, before, record, note)
    status = world.with_condition(status, JobCondition.RESIZING, False, *note)
    text = f"round {round_} begins: {text}"
    return begin_round(world, status, warning(Reason.RESIZE_FAILED, text))


def roll_back(world: World) -> Decision | None:
    """Return the decision that begins the round from the step of spec.rollback, or None if it is not due.

    The gang keeps its pods. A round without a restore point needs no other one: its choice reads the order.
    """
    order = rollback.ordered(world)
    step = None if order is None else order.step
    if step is None or world.status.restore_point is None or world.spec.suspend:
        return None
    if rollback.obstacle(world, step) is not None:
        return None
    round_ = world.next_round
    text = f"round {round_}: a person has rolled the job back to step {step}"
    note = Note(Reason.ROLLED_BACK, text)
    status = _begun(with_levels(world.status, world), world, _members(world, set(), round_), note)
    status = _with_recovery(with_promotions(status, world), world, note)
    status = world.with_condition(status, JobCondition.RESTARTING, True, *note)
    return begin_round(world, status, normal(*note))


def resize_gang(world: World) -> Decision | None:
    """Return the decision that begins the round with the new number of workers, or None if it is not due."""
    if world.spec.suspend or not sizes.may_resize(world):
        return None
    asked = stop_requested(world.status)
    if not (asked and ends.stopped_and_saved(world)):
        at_work = world.state.running and not world.state.dead
        if at_work or ends.drains(world) or not ends.may_suspend_now(world):
            return None
    workers = sizes.next_workers(world)
    job, had = world.job, f"the gang had {len(world.members)} workers"
    note = Note(Reason.RESIZED, f"spec.workers is {workers}, and {had}")
    if sizes.is_growing(job, world.status):
        note = Note(Reason.GROWN, f"there are nodes for {workers} workers, and {had}")
    elif workers < job.spec.workers:
        note = Note(Reason.RESIZED, f"elastic.min is {workers}, and {had}")
    round_ = world.next_round
    status = _resized(world, workers, sizes.resized(world, workers), note)
    text = f"round {round_} begins: {note.message}"
    return begin_round(world, status, normal(note.reason, text))


def shrink_gang(world: World) -> Decision | None:
    """Return the decision that begins a round with fewer workers, or None if it is not due or not possible.

    All pods of the round are new, as after a resize. No committed step is lost with the old ones.
    """
    if world.spec.suspend or not sizes.lacks_nodes(world):
        return None
    if sizes.shrink_obstacle(world) is not None:
        return None
    workers = sizes.fewer_workers(world)
    text = f"{scheduling.describe(world)}. The gang continues with {workers} of {world.spec.workers} workers"
    note = Note(Reason.SHRUNK, text)
    round_ = world.next_round
    status = _resized(world, workers, sizes.resized(world, workers), note)
    status = world.with_condition(status, JobCondition.WORKERS_MISSING, True, *note)
    text = f"round {round_} begins with {workers} workers"
    return begin_round(world, status, normal(Reason.ROUND_BEGAN, text))


def grow_gang(world: World) -> Decision | None:
    """Return the decision to resize the gang to the workers for which there are nodes, or None.

    The status records the number. Then the gang is resized as after a change of spec.workers.
    """
    job, present = world.job, len(world.members)
    found = len(world.placeholders_with_nodes)
    if not found or not sizes.may_grow(world):
        return None
    workers = min(present + found, job.spec.workers)
    gathered = world.seconds_seen(Seen.ROOM) >= GATHER_ROOM_SECONDS
    if workers < job.spec.workers and not gathered:
        return None
    record = ElasticStatus(workers=workers, of_workers=job.spec.workers)
    status = changed(world.status, elastic=record)
    status = sizes.with_missing_workers(status, world)
    return written(world, status, [], f"the gang grows to {workers} workers")


def replace_late_pods(world: World) -> Decision | None:
    """Return the decision to avoid the nodes on which pods have not started in time, or None if all have.

    The next pass creates the pods again (nodes.py).
    """
    status = scheduling.with_late_nodes(world)
    if status is world.status:
        return None
    limit = world.spec.start_timeout_seconds
    known = {f.node for f in world.status.node_failures if f.by_rule}
    avoided = [f.node for f in status.node_failures if f.by_rule and f.node not in known]
    text = scheduling.describe_late(world, limit) or ""
    text += f". New pods avoid {first_of(avoided)}, and the pods there are created again"
    event = warning(Reason.POD_NOT_STARTED, text)
    return written(world, status, [event], text)


def _give_back(world: World) -> Decision:
    """Begin the round whose pods are created after a back-off (ADR 0011).

    All pods of the present round, which could not all be scheduled, are deleted.
    """
    round_, at, why = world.next_round, scheduling.next_try(world), scheduling.describe(world)
    seconds = world.spec.schedule_timeout_seconds
    text = (
        f"{why}. After {seconds} s all pods of the gang are deleted. "
        f"Round {round_} creates them again at {stamp(at)}"
    )
    note = Note(Reason.NOT_SCHEDULED, text)
    tries = SchedulingStatus(timeouts=scheduling.timeouts(world) + 1, retry_at=at)
    status = _with_new_pods(world, len(world.members), note, scheduling=tries)
    status = world.with_condition(status, JobCondition.UNSCHEDULABLE, True, *note)
    text = f"round {round_} begins after a back-off: {why}"
    return begin_round(world, status, normal(Reason.ROUND_BEGAN, text))


def schedule(world: World) -> Decision | None:
    """Return the decision about a gang that was not scheduled in time, or None if there is nothing to do.

    1. A new round begins, in which all pods are new (CAS 1).
    2. The pods of the round before are deleted.
    3. After the back-off the status says that the pods may be created.
    """
    left = scheduling.seconds_until_next_try(world)
    if left is None:
        kept = not scheduling.timed_out(world) or scheduling.lost_if_deleted(world)
        return None if kept else _give_back(world)
    if left > 0:
        known = world.status.condition(JobCondition.UNSCHEDULABLE)
        note = Note(Reason.NOT_SCHEDULED, "" if known is None else known.message)
        actions = gang.delete_obsolete(world)
        return with_status_write(world, actions, note, min(left, WAITING_SECONDS))
    tries = world.status.scheduling
    assert tries is not None
    status = changed(world.status, scheduling=changed(tries, retry_at=None))
    return written(world, status, [], "the pods of the gang are created again")
