"""Report gangs whose pods cannot all be scheduled. Pure."""

from __future__ import annotations

from holdfast_core.api import JobCondition, TrainingJobStatus, changed
from holdfast_operator.decide.facts import scheduling
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now
from holdfast_operator.model.reasons import Reason


def with_scheduling(
    status: TrainingJobStatus, world: World, memory: JobMemory, now: Now
) -> TrainingJobStatus:
    """Return the status with condition Unschedulable. A gang that is scheduled in time does not get it."""
    kind, job = JobCondition.UNSCHEDULABLE, world.observed.job
    if status.restart_round != world.status.restart_round:
        return status
    lost = None
    if scheduling.timed_out(world, memory, now):
        lost = scheduling.lost_if_deleted(world)
    if lost is not None:
        text = f"{scheduling.describe(world)}. The other pods of the gang keep their nodes, because {lost}"
        return status.with_condition(kind, True, Reason.PODS_KEPT, text, now.utc, job.generation)
    placed = all(m.pod is not None and m.pod.node is not None for m in world.members)
    if not (placed and (status.scheduling is not None or status.is_true(kind))):
        return status
    text = "all pods of the gang have nodes"
    status = changed(status, scheduling=None)
    return status.with_condition(kind, False, Reason.SCHEDULED, text, now.utc, job.generation)
