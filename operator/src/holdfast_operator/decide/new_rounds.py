"""How rounds begin: the status of CAS 1 for each reason, and the passes that begin them. Pure.

The status that begins a round: CAS 1, the fence. Pure.

It is durable before the round has any other effect.

Passes over a job that is over, suspended, resized, short of nodes, or has no round yet. Pure.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from holdfast_core.api import (
    ElasticStatus,
    JobCondition,
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
from holdfast_operator.decide import gang, lifecycle, recovery, scheduling, sizes
from holdfast_operator.decide.conditions import with_hang
from holdfast_operator.decide.evidence import (
    Failure,
    Ruling,
    kept_restarts,
    with_evidence,
    with_restart,
)
from holdfast_operator.decide.nodes import with_node_failures, workers_to_move
from holdfast_operator.decide.readable import with_missing_restore_point
from holdfast_operator.decide.round_message import with_expected_failures
from holdfast_operator.decide.scheduling import describe, next_try, timeouts
from holdfast_operator.decide.spares import with_new_spares, with_promotions
from holdfast_operator.decide.spec import accepted, find_problem
from holdfast_operator.decide.status import with_levels
from holdfast_operator.decide.world import (
    MemberState,
    Note,
    World,
    asked_for,
    seconds_since,
    set_condition,
    stop_requested,
)
from holdfast_operator.decide.writes import (
    WAITING_SECONDS,
    begin_round,
    with_status,
    with_status_write,
    written,
)
from holdfast_operator.model.actions import Action, Decision, EmitEvent, EventKind
from holdfast_operator.model.job import JobMemory, Now, Seen
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_of


def first_status(world: World, now: Now) -> TrainingJobStatus:
    """Return the status that begins the first round: round 0, or a round above those of sidecars and pods."""
    round_ = world.next_round
    newer = world.pods_ahead
    workers = range(world.observed.job.spec.workers)
    status = changed(
        with_expected_failures(world.status, world),
        restart_round=round_,
        members=tuple(newer.get(Worker(w), round_) for w in workers),
        restore_point=None,
        coordinator=None,
        start_time=world.status.start_time or now.utc,
    )
    return with_promotions(status, world)


def next_round(world: World, ruling: Ruling, now: Now) -> TrainingJobStatus:
    """Return the status that begins the next round after the failures of this ruling."""
    job = world.observed.job
    failures = ruling.failures
    status = with_levels(world.status, world)
    round_ = world.next_round
    status = with_node_failures(status, world, ruling, round_, now)
    gone = {f.worker for f in failures if f.replace_pod}
    gone |= workers_to_move(world, status, ruling, gone)
    members = _members(world, gone, round_)
    cause = failures[0]
    recent = kept_restarts(world, now)
    if not ruling.disruption:
        # A failure that the user expects is no evidence against the checkpoint.
        failed_from = None if ruling.ignored else ruling.failed_from
        record = RestartRecord(
            round=round_,
            at=now.utc,
            ignored=ruling.ignored,
            failed_from=failed_from,
        )
        recent = with_restart(recent, record)
        status = with_evidence(status, world, recent, now)
    if cause.reason is Reason.CHECKPOINT_MISSING:
        status = with_missing_restore_point(status, world, now)
    note = Note(cause.reason, f"round {round_}: {ruling.text}")
    status = _not_asked(status, note, now, job.generation)
    status = changed(
        status,
        restart_round=round_,
        members=members,
        restore_point=None,
        coordinator=None,
        restarts=status.restarts + 1,
        recent_restarts=recent,
    )
    if cause.reason is Reason.HUNG:
        status = with_hang(status, world, cause.message, now)
    status = with_promotions(with_expected_failures(status, world), world)
    status = status.with_recovery(_recovery(world, round_, failures))
    status = set_condition(status, JobCondition.RESTARTING, True, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


def _not_asked(
    status: TrainingJobStatus, note: Note, now: Now, generation: int
) -> TrainingJobStatus:
    """Return the status of a new round, whose gang was not asked to stop yet."""
    for kind, value in ((JobCondition.SUSPENDED, False), (JobCondition.RESIZING, True)):
        if asked_for(status, kind):
            status = set_condition(status, kind, value, note, now, generation)
    return status


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


def with_taken_in(world: World, ruling: Ruling, reason: str, now: Now) -> TrainingJobStatus:
    """Return the status of the present round, which also replaces the pods of these failures (ADR 0008).

    Args:
        reason: The first cause of the round and of these failures.
    """
    round_ = world.round
    status = with_node_failures(world.status, world, ruling, round_, now)
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
    return set_condition(
        status, JobCondition.RESTARTING, True, note, now, world.observed.job.generation
    )


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


def round_after_time_out(world: World, now: Now) -> TrainingJobStatus:
    """Return the status that begins the round whose pods are created after a back-off (ADR 0011).

    All pods of the present round, which could not all be scheduled, are deleted.
    """
    round_, job = world.next_round, world.observed.job
    at = next_try(world, now)
    text = (
        f"{describe(world)}. After {job.spec.schedule_timeout_seconds} s all pods of the gang are deleted. "
        f"Round {round_} creates them again at {stamp(at)}"
    )
    note = Note(Reason.NOT_SCHEDULED, text)
    status = changed(
        world.status,
        restart_round=round_,
        members=(round_,) * len(world.members),
        restore_point=None,
        coordinator=None,
        scheduling=SchedulingStatus(timeouts=timeouts(world) + 1, retry_at=at),
    )
    status = with_new_spares(status, world)
    status = set_condition(status, JobCondition.UNSCHEDULABLE, True, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


def resumed_round(world: World, now: Now) -> TrainingJobStatus:
    """Return the status that begins the round after a suspension. All of its pods are new."""
    round_ = world.next_round
    job = world.observed.job
    note = Note(Reason.RESUMED, f"round {round_}: spec.suspend is false again")
    workers = sizes.next_workers(world)
    status = changed(
        with_expected_failures(world.status, world),
        restart_round=round_,
        members=(round_,) * workers,
        resize=sizes.resized(world, workers, round_),
        restore_point=None,
        coordinator=None,
        start_time=now.utc,
    ).with_recovery(RecoveryStatus(round=round_, reason=Reason.RESUMED, begun_at=now.utc))
    status = with_new_spares(status, world)
    status = set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


def resized_round(world: World, workers: int, note: Note, now: Now) -> TrainingJobStatus:
    """Return the status that begins a round with another number of workers. All of its pods are new.

    The newest committed step must be in the object store, if there is one.
    """
    record = sizes.resized(world, workers, world.next_round)
    return _with_new_pods(world, workers, record, note, now)


def round_of_way_back(world: World, failure: Failure, now: Now) -> TrainingJobStatus:
    """Return the status that begins a round with the number of workers before the resize that failed.

    status.resize must name this number. The failed start counts neither as a restart of the gang nor against
    the checkpoint.
    """
    old, present = world.status.resize, len(world.members)
    assert old is not None
    before = old.from_workers or present
    record = ResizeStatus(
        round=world.next_round,
        refused_workers=present,
        refused_of_workers=world.observed.job.spec.workers,
    )
    text = f"{sizes.describe_refused(present, before)}. The failure: {failure.message}"
    note = Note(Reason.RESIZE_FAILED, text)
    status = _with_new_pods(world, before, record, note, now)
    generation = world.observed.job.generation
    return set_condition(status, JobCondition.RESIZING, False, note, now, generation)


def _with_new_pods(
    world: World, workers: int, record: ResizeStatus | None, note: Note, now: Now
) -> TrainingJobStatus:
    round_, job = world.next_round, world.observed.job
    status = with_expected_failures(with_levels(world.status, world), world)
    status = _not_asked(status, note, now, job.generation)
    status = changed(
        status,
        restart_round=round_,
        members=(round_,) * workers,
        restore_point=None,
        coordinator=None,
        resize=record,
        elastic=sizes.elastic_record(job, workers),
        scheduling=None,
    ).with_recovery(RecoveryStatus(round=round_, reason=note.reason, begun_at=now.utc))
    status = with_new_spares(status, world)
    status = set_condition(status, JobCondition.RESIZING, True, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


GATHER_ROOM_SECONDS = 30.0
"""Time for which a gang that found a node waits for nodes for its other missing workers. Each growth costs a
save and a restart."""


def first_round(world: World, memory: JobMemory, now: Now) -> Decision:
    job = world.observed.job
    problem = find_problem(world)
    status = accepted(world, now, problem)
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
    begun = first_status(World(with_status(world, status)), now)
    event = EmitEvent(EventKind.NORMAL, Reason.ROUND_BEGAN, f"round {begun.restart_round} begins")
    return begin_round(world, memory, now, begun, (), event)


def resize_gang(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision that begins the round with the new number of workers, or None if it is not due."""
    if world.observed.job.spec.suspend or not sizes.may_resize(world):
        return None
    asked = stop_requested(world.status)
    if not (asked and lifecycle.stopped_and_saved(world)):
        state = world.coordinator
        at_work = state is not None and state.running and not state.dead
        if at_work or lifecycle.drains(world, memory, now) or not lifecycle.may_suspend_now(world):
            return None
    workers = sizes.next_workers(world)
    job, had = world.observed.job, f"the gang had {len(world.members)} workers"
    note = Note(Reason.RESIZED, f"spec.workers is {workers}, and {had}")
    if sizes.is_growing(job, world.status):
        note = Note(Reason.GROWN, f"there are nodes for {workers} workers, and {had}")
    elif workers < job.spec.workers:
        note = Note(Reason.RESIZED, f"elastic.min is {workers}, and {had}")
    status = resized_round(world, workers, note, now)
    status = recovery.interrupted(status, memory)
    text = f"round {status.restart_round} begins: {note.message}"
    event = EmitEvent(EventKind.NORMAL, note.reason, text)
    return begin_round(world, memory, now, status, (), event)


def shrink_gang(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision that begins a round with fewer workers, or None if it is not due or not possible.

    All pods of the round are new, as after a resize. No committed step is lost with the old ones.
    """
    job = world.observed.job
    if job.spec.suspend or not sizes.lacks_nodes(world, memory, now):
        return None
    if sizes.shrink_obstacle(world) is not None:
        return None
    workers = sizes.fewer_workers(world)
    text = f"{scheduling.describe(world)}. The gang continues with {workers} of {job.spec.workers} workers"
    note = Note(Reason.SHRUNK, text)
    status = resized_round(world, workers, note, now)
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
    if not found or not sizes.may_grow(world):
        return None
    workers = min(present + found, job.spec.workers)
    gathered = seconds_since(memory.seen_at(Seen.ROOM), now) >= GATHER_ROOM_SECONDS
    if workers < job.spec.workers and not gathered:
        return None
    record = ElasticStatus(workers=workers, of_workers=job.spec.workers)
    status = changed(world.status, elastic=record)
    status = sizes.with_missing_workers(status, world, memory, now)
    return written(world, memory, now, status, [], f"the gang grows to {workers} workers")


def replace_late_pods(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the decision to avoid the nodes on which pods have not started in time, or None if all have.

    The next pass creates the pods again (nodes.py).
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
        status = recovery.interrupted(round_after_time_out(world, now), memory)
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
