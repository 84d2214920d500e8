"""Another number of workers: conditions Resizing and WorkersMissing, and placeholders. Pure.

A resize (ADR 0011):
1. While the gang trains, it is asked to save and stop, as for a suspension. The record of the request is
   reason Stopping of condition Resizing.
2. Once no committed step would be lost with the pods, a round with the new number of new pods begins
   (beginnings.resize_gang). An operator that dies continues from the status.
3. If the ranks fail before their first step, a round with the number before begins (failures.py).

An elastic gang for some of whose workers there are no nodes (ADR 0011):
1. It begins a round without them (beginnings.shrink_gang).
2. When it has trained for growAfterSeconds, placeholders are created for the missing workers.
3. When placeholders have nodes, the status gets the new number, and the gang is resized
   (beginnings.grow_gang). They keep the nodes until the round with the new workers begins.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition, TrainingJobStatus, changed
from holdfast_core.ids import Worker
from holdfast_operator.decide import lifecycle
from holdfast_operator.decide.facts import readable, resize, scheduling
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import Delete, DesiredObject
from holdfast_operator.model.job import Done, JobMemory, Now, Seen
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.pod import render_placeholder


def with_resizing(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status of the present round with condition Resizing. A job that keeps its size gets none.

    Once every rank has finished a step with the new number of workers, there is no way back to the old one.
    """
    status = _with_record(status, world)
    asked = lifecycle.asked_for(status, JobCondition.RESIZING)
    value, note = _waits_for(status, world)
    if note is None:
        if status.condition(JobCondition.RESIZING) is None and status.resize is None:
            return status
        note = Note(Reason.RESIZED, f"the gang has {len(world.members)} workers")
    if asked:
        value, note = True, replace(note, reason=Reason.STOPPING)
    generation = world.observed.job.generation
    return set_condition(status, JobCondition.RESIZING, value, note, now, generation)


def _with_record(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    record = status.resize
    if record is None:
        return status
    if status.is_true(JobCondition.RUNNING) and record.from_workers is not None:
        record = changed(record, from_workers=None)
    if resize.refused_workers(world.observed.job, status) is None:
        record = changed(record, refused_workers=None, refused_of_workers=None)
    return changed(status, resize=record)


def _waits_for(status: TrainingJobStatus, world: World) -> tuple[bool, Note | None]:
    """Return the value of the condition, and what the resize waits for or why it is refused."""
    present, wanted = len(world.members), resize.wanted_workers(world.observed.job, status)
    record = status.resize
    refused = resize.refused_workers(world.observed.job, status)
    if (
        record is not None
        and refused is not None
        and wanted in (present, refused)
        and not resize.is_untried(status)
    ):
        known = status.condition(JobCondition.RESIZING)
        text = resize.describe_refused(refused, present)
        if known is not None and known.message.startswith(text):
            text = known.message  # it has the failure as well
        return False, Note(Reason.RESIZE_FAILED, text)
    if wanted != present:
        step = f"the gang of {present} workers is to have {wanted}"
        obstacle = lifecycle.resize_obstacle(world)
        if obstacle is not None:
            refused = obstacle.reason == Reason.NO_OBJECT_TIER
            return not refused, replace(obstacle, message=f"{step}, but {obstacle.message}")
        if lifecycle.trains(world):
            return True, Note(Reason.STOPPING, f"{step}: it was requested to save and stop")
        lost = readable.lost_with_all_pods(world)
        text = lost or "the operator has to record the newest upload first"
        return True, Note(Reason.NOT_PERSISTED, f"{step}. It recovers first: {text}")
    if resize.is_untried(status):
        text = f"round {world.round} starts with {present} workers"
        return True, Note(Reason.STARTING, text)
    return False, None


# --------------------------------------------------------------------------- missing nodes


def shrink_obstacle(world: World) -> str | None:
    """Return why a gang that lacks nodes cannot continue with fewer workers, or None if it can."""
    lost = scheduling.lost_if_deleted(world) or resize.too_few(world)
    if lost is not None:
        return lost
    found = lifecycle.resize_obstacle(world)
    return None if found is None else found.message


def with_missing_workers(
    status: TrainingJobStatus, world: World, memory: JobMemory, now: Now
) -> TrainingJobStatus:
    """Return the status with condition WorkersMissing. A gang that never lacked nodes does not get it."""
    kind, job = JobCondition.WORKERS_MISSING, world.observed.job
    if job.spec.elastic is not None and resize.elastic_of(job) is None:
        text = "elastic has no effect in a queue: Kueue admits all pods of the gang or none of them"
        without_effect = Note(Reason.CANNOT_SHRINK, text)
        return set_condition(status, kind, False, without_effect, now, job.generation)
    note = _missing(status, world, memory, now)
    if note is not None:
        return set_condition(status, kind, True, note, now, job.generation)
    if not status.is_true(kind):
        return status
    workers = job.spec.workers
    missing = resize.workers_with_nodes(world) < workers
    note = Note(Reason.ALL_WORKERS, f"all {workers} workers have nodes")
    if missing:
        text = f"the pods of {len(world.members)} workers wait for nodes"
        note = Note(Reason.WAITING_FOR_PODS, text)
    return set_condition(status, kind, missing, note, now, job.generation)


def _missing(status: TrainingJobStatus, world: World, memory: JobMemory, now: Now) -> Note | None:
    """Return for which workers there are no nodes, and what the gang does about it, or None."""
    job = world.observed.job
    if resize.lacks_nodes(world, memory, now):
        why = shrink_obstacle(world)
        text = f"{scheduling.describe(world)}. The gang cannot continue without them"
        return Note(Reason.CANNOT_SHRINK, text if why is None else f"{text}: {why}")
    present, wanted = len(world.members), resize.wanted_workers(job, status)
    if resize.is_growing(job, status):
        text = f"there are nodes for {wanted} of {job.spec.workers} workers"
        return Note(
            Reason.GROWING, f"{text}: the gang of {present} saves, stops and continues with them"
        )
    if wanted == job.spec.workers:
        return None
    text = f"the gang continues with {wanted} of {job.spec.workers} workers"
    refused = resize.refused_workers(job, status)
    if refused is not None and refused > wanted:
        text += f". It failed with {refused}, and grows after spec.workers has changed"
    waiting = [p for p in world.observed.placeholders if p.alive and p.unscheduled]
    if waiting:
        why = next((p.message for p in waiting if p.message), "the scheduler has not said why")
        text += f". There is no node for {len(waiting)} placeholders: {why}"
    if memory.placeholders_refused:
        text += (
            f". The API server refuses a placeholder, and the operator tries again after "
            f"elastic.growAfterSeconds: {memory.placeholders_refused}"
        )
    return Note(Reason.SHRUNK, text)


# --------------------------------------------------------------------------- placeholders


def may_grow(world: World) -> bool:
    """Return whether the gang trains, lacks workers, and could continue with more of them."""
    return _lacks_workers(world) and lifecycle.trains(world) and _keeps_placeholders(world)


def _lacks_workers(world: World) -> bool:
    """Return whether an elastic gang runs with fewer workers than spec.workers, and may have more.

    If the ranks have failed with more workers, it has to wait for another spec.workers.
    """
    job, status, present = world.observed.job, world.status, len(world.members)
    refused = resize.refused_workers(job, status)
    return (
        resize.elastic_of(job) is not None
        and status.is_true(JobCondition.RUNNING)
        and resize.wanted_workers(job, status) == present < job.spec.workers
        and (refused is None or refused < present)
    )


def _keeps_placeholders(world: World) -> bool:
    """Return whether placeholders may stay, because the gang grows or would grow with their nodes."""
    job = world.observed.job
    if job.deleting or job.spec.suspend or lifecycle.is_over(world.status):
        return False
    needed = resize.is_growing(job, world.status) or _lacks_workers(world)
    return needed and lifecycle.resize_obstacle(world) is None


def new_placeholders(
    world: World, memory: JobMemory, now: Now
) -> tuple[list[DesiredObject], JobMemory]:
    """Return the creates of placeholders for all missing workers if they are due.

    They are created once in elastic.growAfterSeconds. They stay until they have nodes: a scheduler tries pods
    again when there is room.
    """
    observed = world.observed
    job = observed.job
    elastic = resize.elastic_of(job)
    since = memory.done.get(Done.PLACEHOLDERS_CREATED, memory.seen_at(Seen.CHOSEN))
    if elastic is None or not may_grow(world):
        return [], memory
    if seconds_since(since, now) < elastic.grow_after_seconds:
        return [], memory
    present = {p.worker for p in world.observed.placeholders}
    creates = [
        DesiredObject(render_placeholder(job, Worker(w), observed.store, observed.sidecar))
        for w in range(len(world.members), job.spec.workers)
        if w not in present
    ]
    return creates, memory.with_done(Done.PLACEHOLDERS_CREATED, now)


def unneeded_placeholders(world: World) -> list[Delete]:
    """Return deletes of the placeholders that have ended or that no growth of the gang needs any more.

    The pods of a round that has begun need their nodes.
    """
    kept = _keeps_placeholders(world)
    actions = []
    for pod in world.observed.placeholders:
        lost = world.observed.node_lost(pod)
        if (not kept or pod.ended or lost) and (lost or not pod.terminating):
            why = "the gang does not grow, or the placeholder has ended or its node is lost"
            actions.append(Delete(kinds.POD, pod.name, pod.uid, why, force=lost))
    return actions
