"""Report gangs whose pods have no nodes, and workers on nodes that will be taken away soon. Pure."""

from __future__ import annotations

from holdfast_core.api import JobCondition, TrainingJobStatus, changed
from holdfast_operator.decide.facts import scheduling
from holdfast_operator.decide.facts.departures import departures, why_pods_stay
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_of


def with_leaving_nodes(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with condition NodesLeaving, which a job without such a node does not get."""
    kind, found = JobCondition.NODES_LEAVING, departures(world)
    if not found and not status.is_true(kind):
        return status
    reason, text = Reason.NODES_STAY, "no worker runs on a node that will be taken away"
    if found:
        text = f"nodes will be taken away: {first_of(found)}. "
        stay = why_pods_stay(world)
        if stay is None:
            reason = Reason.NODE_LEAVING
            text += (
                "While all ranks train, one of these pods after the other is deleted and replaced"
            )
        else:
            reason = Reason.NODE_LEAVING_POD_STAYS
            text += f"The operator deletes none of these pods: {stay}"
    generation = world.observed.job.generation
    return status.with_condition(kind, bool(found), reason, text, now.utc, generation)


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
        return status.with_condition(kind, True, Reason.NODES_KEPT, text, now.utc, job.generation)
    placed = all(m.pod is not None and m.pod.node is not None for m in world.members)
    if not (placed and (status.scheduling is not None or status.is_true(kind))):
        return status
    text = "all pods of the gang have nodes"
    status = changed(status, scheduling=None)
    return status.with_condition(kind, False, Reason.SCHEDULED, text, now.utc, job.generation)
