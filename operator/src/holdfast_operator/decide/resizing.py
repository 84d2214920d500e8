"""Condition Resizing: what a change of spec.workers waits for, or why it is refused (ADR 0101). Pure.

1. While the gang trains, it is asked to save and stop, as for a suspension. The record of the request is
   reason Stopping of this condition.
2. Once no committed step would be lost with the pods, a round with the new number of new pods begins
   (beginnings.resize_gang). An operator that dies continues from the status.
3. If the ranks fail before their first step, a round with the number before begins (after_failures.py).
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition, TrainingJobStatus, changed
from holdfast_operator.decide import lifecycle
from holdfast_operator.decide.facts import readable, resize
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason


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
    if record.refused_workers not in (None, world.observed.job.spec.workers):
        record = changed(record, refused_workers=None, refused_because=None)
    return changed(status, resize=record)


def _waits_for(status: TrainingJobStatus, world: World) -> tuple[bool, Note | None]:
    """Return the value of the condition, and what the resize waits for or why it is refused."""
    present, wanted = len(world.members), world.observed.job.spec.workers
    record = status.resize
    if record is not None and record.refused_workers == wanted:
        text = (
            f"the gang failed with {wanted} workers before its first step, and continues with {present}: "
            f"{record.refused_because}. It is tried again after spec.workers has changed"
        )
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
