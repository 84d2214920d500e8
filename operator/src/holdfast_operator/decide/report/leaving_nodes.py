"""Report workers on nodes that will be taken away soon. Pure."""

from __future__ import annotations

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_operator.decide.facts.departures import departures, why_pods_stay
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import Now
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
