"""Report gangs that wait for their queue in Kueue, and labels that take effect later. Pure."""

from __future__ import annotations

from holdfast_core.api import JobCondition, TrainingJobStatus, changed
from holdfast_operator.decide import queue
from holdfast_operator.decide.facts.world import World, has_no_gang
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason


def with_queue(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status of the present round with condition Queued. A gang that was in no queue gets none."""
    kind, job = JobCondition.QUEUED, world.observed.job
    if status.restart_round != world.status.restart_round or has_no_gang(status):
        return status
    status = _with_start(status, world, now)
    value, reason, text = _state(status, world)
    change = queue.describe_change(world)
    if change is not None:
        reason, text = Reason.QUEUE_CHANGES_LATER, f"{change}. {text}"
    elif value is None:
        return status
    return status.with_condition(kind, bool(value), reason, text[:1024], now.utc, job.generation)


def _state(status: TrainingJobStatus, world: World) -> tuple[bool | None, Reason, str]:
    """Return the value, reason and message of the condition. None: nothing is known about a queue."""
    known = status.condition(JobCondition.QUEUED)
    if queue.waits(world):
        return True, Reason.WAITING_FOR_QUEUE, queue.describe_wait(world)
    if any(m.pod is None for m in world.members):
        # Kueue has not seen all pods of the group yet.
        value = None if known is None else known.is_true
        return value, Reason.WAITING_FOR_QUEUE, "" if known is None else known.message
    group = queue.present_group(world)
    if group is None:
        value = None if known is None else False
        return value, Reason.NOT_QUEUED, "the pods of the gang are in no queue"
    text = f"group {group.name} is admitted to LocalQueue {group.queue}"
    return False, Reason.ADMITTED_BY_QUEUE, text


def _with_start(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status without a start time while the whole gang waits, and with one when it may run.

    As for a Job of batch/v1 that Kueue suspends, activeDeadlineSeconds does not count the wait.
    """
    if status.restart_round is None:
        return status
    if queue.waits_as_a_whole(world):
        return changed(status, start_time=None)
    if status.start_time is None and all(m.pod is not None for m in world.members):
        return changed(status, start_time=now.utc)
    return status
