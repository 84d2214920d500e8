"""The number of workers of a gang: which it has, which it is to have, and what is in the way. Pure.

The present number is that of status.members. The wanted one is spec.workers, or the smaller number for which
an elastic gang has nodes (ADR 0011). A number with which the ranks failed before their first step is refused:
the gang goes back to the number before, and the refused one is tried again once spec.workers has changed.
An elastic gang then tries lower numbers only, so that it never alternates between two numbers.

A resize (ADR 0011):
1. While the gang trains, it is asked to save and stop, as for a suspension. The record of the request is
   reason Stopping of condition Resizing.
2. Once no committed step would be lost with the pods, a round with the new number of new pods begins
   (writes.resize_gang). An operator that dies continues from the status.
3. If the ranks fail before their first step, a round with the number before begins (failures.py).

An elastic gang for some of whose workers there are no nodes (ADR 0011):
1. It begins a round without them (writes.shrink_gang).
2. When it has trained for growAfterSeconds, placeholders are created for the missing workers.
3. When placeholders have nodes, the status gets the new number, and the gang is resized
   (writes.grow_gang). They keep the nodes until the round with the new workers begins.
"""

from __future__ import annotations

from holdfast_core.api import (
    ElasticSpec,
    ElasticStatus,
    Gang,
    JobCondition,
    ResizeStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import Worker
from holdfast_operator.decide.facts import readable, scheduling
from holdfast_operator.decide.facts.spec import replacement_problem
from holdfast_operator.decide.facts.world import (
    Note,
    World,
    asked_for,
    held_uploads,
    is_over,
    trains,
)
from holdfast_operator.model.actions import Delete, DesiredObject
from holdfast_operator.model.job import Done, Seen, queue_of
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import render_placeholder


def elastic_of(job: Gang) -> ElasticSpec | None:
    """Return spec.elastic, or None without it and for a job in a queue of Kueue.

    Kueue admits all pods of a group or none of them, and placeholders would take nodes without its consent.
    """
    return job.spec.elastic if queue_of(job) is None else None


def wanted_workers(job: Gang, status: TrainingJobStatus) -> int:
    """Return the number of workers that the gang is to have: spec.workers, or fewer if nodes are missing."""
    spec, elastic, found = job.spec, elastic_of(job), status.elastic
    if elastic is None or found is None or found.of_workers != spec.workers:
        return spec.workers
    return min(spec.workers, max(found.workers, elastic.min))


def elastic_record(job: Gang, workers: int) -> ElasticStatus | None:
    """Return status.elastic of a gang with this number of workers, or None if it has all of spec.workers."""
    spec, elastic = job.spec, elastic_of(job)
    if elastic is None or not elastic.min <= workers < spec.workers:
        return None
    return ElasticStatus(workers=workers, of_workers=spec.workers)


def is_growing(job: Gang, status: TrainingJobStatus) -> bool:
    """Return whether nodes were found for more workers than an elastic gang has."""
    found, wanted = status.elastic, wanted_workers(job, status)
    recorded = (
        found is not None and found.workers == wanted and found.of_workers == job.spec.workers
    )
    return recorded and len(status.members) < wanted


def refused_workers(job: Gang, status: TrainingJobStatus) -> int | None:
    """Return the number with which the gang failed before its first step, if spec.workers is the same."""
    record = status.resize
    if record is None or record.refused_of_workers != job.spec.workers:
        return None
    return record.refused_workers


def describe_refused(refused: int, present: int) -> str:
    """Say which number of workers is refused, and with which number the gang continues."""
    return (
        f"the gang failed with {refused} workers before its first step, and continues with {present}. It "
        "tries the other number again after spec.workers has changed"
    )


def next_workers(world: World) -> int:
    """Return the number of workers of a gang that starts again with new pods.

    It is the present number if the gang has failed with the number that it is to have.
    """
    job, status = world.job, world.status
    wanted = wanted_workers(job, status)
    return len(world.members) if refused_workers(job, status) == wanted else wanted


def resized(world: World, workers: int) -> ResizeStatus | None:
    """Return status.resize of the next round if it has this number of workers.

    There is a way back to the number of workers that last trained, if they have committed a step.
    """
    old, round_ = world.status.resize, world.next_round
    if workers == len(world.members):
        return old
    before = len(world.members)
    if old is not None and old.from_workers is not None:
        before = old.from_workers
    untried = workers != before and readable.recorded_commit(world) is not None
    from_workers = before if untried else None
    if old is not None and refused_workers(world.job, world.status) is not None:
        return changed(old, round=round_, from_workers=from_workers)
    return ResizeStatus(round=round_, from_workers=from_workers)


def is_untried(status: TrainingJobStatus) -> bool:
    """Return whether no round has trained with the present number of workers since it changed."""
    return status.resize is not None and status.resize.from_workers is not None


# --------------------------------------------------------------------------- missing nodes


def lacks_nodes(world: World) -> bool:
    """Return whether pods of an elastic gang have been without nodes for elastic.shrinkAfterSeconds.

    The time begins when the pods of earlier rounds have ended, because the gang waits for their nodes.
    """
    elastic = elastic_of(world.job)
    since = world.memory.seen_at(Seen.LACKING)
    if elastic is None or since is None or not scheduling.waits_for_nodes(world):
        return False
    return world.seconds_since(since) >= elastic.shrink_after_seconds


def workers_with_nodes(world: World) -> int:
    """Return the number of members whose pods have nodes that are not lost."""
    return sum(1 for m in world.members if m.alive and m.node is not None)


def fewer_workers(world: World) -> int:
    """Return the number of workers with which the gang could continue. It may be below elastic.min."""
    found = workers_with_nodes(world)
    refused = refused_workers(world.job, world.status)
    return found if refused is None else min(found, refused - 1)


def too_few(world: World) -> str | None:
    """Return why the gang cannot continue with `fewer_workers`, or None if it can."""
    elastic, workers = elastic_of(world.job), fewer_workers(world)
    if elastic is None or workers >= elastic.min:
        return None
    found = workers_with_nodes(world)
    if found < elastic.min:
        return f"there are nodes for {found} workers, and elastic.min is {elastic.min}"
    return f"it failed with {workers + 1} workers before its first step, and elastic.min is {elastic.min}"


# --------------------------------------------------------------------------- resize


def may_resize(world: World) -> bool:
    """Return whether the gang is to have another number of workers, and nothing stands in the way."""
    other = bool(world.members) and next_workers(world) != len(world.members)
    return other and resize_obstacle(world) is None


def resize_obstacle(world: World) -> Note | None:
    """Return why the gang keeps its number of workers although the spec asks for another one, or None.

    A gang that stopped while its store is away could neither save nor restore. One that stopped while a quota
    is reached would wait for room with all of its nodes. Without a store, a gang may change until one of its
    pods has started.
    """
    begun = readable.recorded_commit(world) is not None or any(p.started for p in world.pods)
    if world.spec.store is None and begun:
        return Note(
            Reason.NO_OBJECT_TIER,
            "the job has no object store, from which the new ranks could read the shards of the old ones. "
            f"It continues with {len(world.members)} workers. Create a new job with this number",
        )
    problem = replacement_problem(world)
    if problem is not None:
        return problem
    held = held_uploads(world)
    return (
        None
        if held is not None and held.reason == Reason.QUOTA_REACHED and not trains(world)
        else held
    )


def with_resizing(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of the present round with condition Resizing. A job that keeps its size gets none.

    Once every rank has finished a step with the new number of workers, there is no way back to the old one.
    """
    status = _with_record(status, world)
    asked = asked_for(status, JobCondition.RESIZING)
    value, note = _waits_for(status, world)
    if note is None:
        if status.condition(JobCondition.RESIZING) is None and status.resize is None:
            return status
        note = Note(Reason.RESIZED, f"the gang has {len(world.members)} workers")
    if asked:
        value, note = True, note._replace(reason=Reason.STOPPING)
    return world.with_condition(status, JobCondition.RESIZING, value, *note)


def _with_record(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    record = status.resize
    if record is None:
        return status
    if status.is_true(JobCondition.RUNNING) and record.from_workers is not None:
        record = changed(record, from_workers=None)
    if refused_workers(world.job, status) is None:
        record = changed(record, refused_workers=None, refused_of_workers=None)
    return changed(status, resize=record)


def _waits_for(status: TrainingJobStatus, world: World) -> tuple[bool, Note | None]:
    """Return the value of the condition, and what the resize waits for or why it is refused."""
    present, wanted = len(world.members), wanted_workers(world.job, status)
    record = status.resize
    refused = refused_workers(world.job, status)
    if (
        record is not None
        and refused is not None
        and wanted in (present, refused)
        and not is_untried(status)
    ):
        known = status.condition(JobCondition.RESIZING)
        text = describe_refused(refused, present)
        if known is not None and known.message.startswith(text):
            text = known.message  # it has the failure as well
        return False, Note(Reason.RESIZE_FAILED, text)
    if wanted != present:
        step = f"the gang of {present} workers is to have {wanted}"
        obstacle = resize_obstacle(world)
        if obstacle is not None:
            refused = obstacle.reason == Reason.NO_OBJECT_TIER
            return not refused, obstacle._replace(message=f"{step}, but {obstacle.message}")
        if trains(world):
            return True, Note(Reason.STOPPING, f"{step}: it was requested to save and stop")
        lost = readable.lost_with_all_pods(world)
        text = lost or "the operator has to record the newest upload first"
        return True, Note(Reason.NOT_PERSISTED, f"{step}. It recovers first: {text}")
    if is_untried(status):
        text = f"round {world.round} starts with {present} workers"
        return True, Note(Reason.STARTING, text)
    return False, None


# --------------------------------------------------------------------------- missing nodes


def shrink_obstacle(world: World) -> str | None:
    """Return why a gang that lacks nodes cannot continue with fewer workers, or None if it can."""
    lost = scheduling.lost_if_deleted(world) or too_few(world)
    if lost is not None:
        return lost
    found = resize_obstacle(world)
    return None if found is None else found.message


def with_missing_workers(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition WorkersMissing. A gang that never lacked nodes does not get it."""
    kind, job = JobCondition.WORKERS_MISSING, world.job
    if job.spec.elastic is not None and elastic_of(job) is None:
        text = "elastic has no effect in a queue: Kueue admits all pods of the gang or none of them"
        without_effect = Note(Reason.CANNOT_SHRINK, text)
        return world.with_condition(status, kind, False, *without_effect)
    note = _missing(status, world)
    if note is not None:
        return world.with_condition(status, kind, True, *note)
    if not status.is_true(kind):
        return status
    workers = job.spec.workers
    missing = workers_with_nodes(world) < workers
    note = Note(Reason.ALL_WORKERS, f"all {workers} workers have nodes")
    if missing:
        text = f"the pods of {len(world.members)} workers wait for nodes"
        note = Note(Reason.WAITING_FOR_PODS, text)
    return world.with_condition(status, kind, missing, *note)


def _missing(status: TrainingJobStatus, world: World) -> Note | None:
    """Return for which workers there are no nodes, and what the gang does about it, or None."""
    job = world.job
    if lacks_nodes(world):
        why = shrink_obstacle(world)
        text = f"{scheduling.describe(world)}. The gang cannot continue without them"
        return Note(Reason.CANNOT_SHRINK, text if why is None else f"{text}: {why}")
    present, wanted = len(world.members), wanted_workers(job, status)
    if is_growing(job, status):
        text = f"there are nodes for {wanted} of {job.spec.workers} workers"
        return Note(
            Reason.GROWING, f"{text}: the gang of {present} saves, stops and continues with them"
        )
    if wanted == job.spec.workers:
        return None
    text = f"the gang continues with {wanted} of {job.spec.workers} workers"
    refused = refused_workers(job, status)
    if refused is not None and refused > wanted:
        text += f". It failed with {refused}, and grows after spec.workers has changed"
    waiting = [p for p in world.observed.placeholders if p.alive and p.unscheduled]
    if waiting:
        why = next((p.message for p in waiting if p.message), "the scheduler has not said why")
        text += f". There is no node for {len(waiting)} placeholders: {why}"
    if world.memory.placeholders_refused:
        text += (
            f". The API server refuses a placeholder, and the operator tries again after "
            f"elastic.growAfterSeconds: {world.memory.placeholders_refused}"
        )
    return Note(Reason.SHRUNK, text)


# --------------------------------------------------------------------------- placeholders


def may_grow(world: World) -> bool:
    """Return whether the gang trains, lacks workers, and could continue with more of them."""
    return _lacks_workers(world) and trains(world) and _keeps_placeholders(world)


def _lacks_workers(world: World) -> bool:
    """Return whether an elastic gang runs with fewer workers than spec.workers, and may have more.

    If the ranks have failed with more workers, it has to wait for another spec.workers.
    """
    job, status, present = world.job, world.status, len(world.members)
    refused = refused_workers(job, status)
    return (
        elastic_of(job) is not None
        and status.is_true(JobCondition.RUNNING)
        and wanted_workers(job, status) == present < job.spec.workers
        and (refused is None or refused < present)
    )


def _keeps_placeholders(world: World) -> bool:
    """Return whether placeholders may stay, because the gang grows or would grow with their nodes."""
    if world.job.deleting or world.spec.suspend or is_over(world.status):
        return False
    needed = is_growing(world.job, world.status) or _lacks_workers(world)
    return needed and resize_obstacle(world) is None


def new_placeholders(world: World) -> list[DesiredObject]:
    """Return the creates of placeholders for all missing workers if they are due.

    They are created once in elastic.growAfterSeconds. They stay until they have nodes: a scheduler tries pods
    again when there is room.
    """
    observed = world.observed
    job = observed.job
    elastic = elastic_of(job)
    since = world.memory.done.get(Done.PLACEHOLDERS_CREATED, world.memory.seen_at(Seen.CHOSEN))
    if elastic is None or not may_grow(world):
        return []
    if world.seconds_since(since) < elastic.grow_after_seconds:
        return []
    present = {p.worker for p in world.observed.placeholders}
    creates = [
        DesiredObject(render_placeholder(job, Worker(w), observed.store, observed.sidecar))
        for w in range(len(world.members), job.spec.workers)
        if w not in present
    ]
    world.remember_done(Done.PLACEHOLDERS_CREATED)
    return creates


def unneeded_placeholders(world: World) -> list[Delete]:
    """Return deletes of the placeholders that have ended or that no growth of the gang needs any more.

    The pods of a round that has begun need their nodes.
    """
    kept, observed = _keeps_placeholders(world), world.observed
    pods = (p for p in observed.placeholders if not kept or p.ended or observed.node_lost(p))
    why = "the gang does not grow, or the placeholder has ended or its node is lost"
    return world.deletes(pods, why)
