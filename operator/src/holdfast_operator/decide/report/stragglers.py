"""Show the ranks that are slower than the others, as the coordinator has found them. Pure.

Nothing restarts because of a straggler: the gang trains, only slower, and the cause may be the data, the
script or a neighbour on the node.
"""

from __future__ import annotations

from holdfast_core.api import MAX_STRAGGLERS, TrainingJobStatus, changed
from holdfast_core.ids import Rank, Worker
from holdfast_core.messages.schema import Straggler
from holdfast_operator.decide.facts.world import World, has_no_gang
from holdfast_operator.model.actions import EmitEvent, EventKind
from holdfast_operator.model.reasons import Reason

_PARTS = {"Input": "mostly for its input", "Forward": "mostly for its forward passes"}
"""Text for the slow part. A newer sidecar may report others."""
_MEASURED_STEPS = 32
"""Steps whose median a rank reports. Only later ones count as those of a straggler in a row."""


def with_stragglers(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with the stragglers that the coordinator has found, and the known ones.

    A known straggler stays while nothing shows that it is over: through restarts of the gang, while the
    coordinator is silent, and until every rank has finished as many steps of the round as it takes to find
    the straggler again. A restart would otherwise repeat the Event about it. It ends with the pod of its
    worker: the new pod may be on another node.
    """
    steps = world.observed.job.spec.failure_policy.stragglers.effective_steps
    if has_no_gang(status) or not steps:
        return changed(status, stragglers=())
    known = {rank for rank in status.stragglers if _has_its_pod(rank, status, world)}
    state, point = world.coordinator, status.restore_point
    if state is None or state.round != status.restart_round or point is None:
        return changed(status, stragglers=tuple(sorted(known)))
    found = {s.rank for s in state.stragglers if _worker(s.rank, world) < len(world.members)}
    finished = -1 if state.progress is None else state.progress.first
    if finished < (point.step or 0) + steps + _MEASURED_STEPS:
        found |= known
    return changed(status, stragglers=tuple(sorted(found)[:MAX_STRAGGLERS]))


def _worker(rank: Rank, world: World) -> Worker:
    return Worker(rank // world.observed.job.spec.procs_per_worker)


def _has_its_pod(rank: Rank, status: TrainingJobStatus, world: World) -> bool:
    """Return whether the worker of this rank keeps its pod, also in the round that `status` begins."""
    worker = _worker(rank, world)
    return status.members[worker : worker + 1] == world.status.members[worker : worker + 1] != ()


def straggler_events(
    before: TrainingJobStatus, after: TrainingJobStatus, world: World
) -> list[EmitEvent]:
    """Return a Warning for each rank that is a straggler now, and a Normal Event for each that was one.

    The end of a round is no such change.
    """
    found = () if world.coordinator is None else world.coordinator.stragglers
    events = [
        EmitEvent(EventKind.WARNING, Reason.STRAGGLER, _describe(s, world))
        for s in found
        if s.rank in after.stragglers and s.rank not in before.stragglers
    ]
    if has_no_gang(after) or before.restart_round != after.restart_round:
        return events
    return events + [
        EmitEvent(
            EventKind.NORMAL,
            Reason.STRAGGLER_RECOVERED,
            f"{_place(rank, world)} is no straggler any more",
        )
        for rank in before.stragglers
        if rank not in after.stragglers
    ]


def _describe(straggler: Straggler, world: World) -> str:
    part = _PARTS.get(straggler.slow_part, straggler.slow_part)
    return (
        f"{_place(straggler.rank, world)} takes {straggler.factor:g} times as long for its part of a step as "
        f"the median, {part}, since step {straggler.since}"
    )


def _place(rank: Rank, world: World) -> str:
    worker = _worker(rank, world)
    member = world.member(worker)
    pod = None if member is None else member.pod
    on = "" if pod is None or pod.node is None else f" on node {pod.node}"
    return f"rank {rank} of worker {worker}{on}"
