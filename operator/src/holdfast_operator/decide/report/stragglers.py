"""Show the ranks that are slower than the others, as the coordinator has found them. Pure.

Nothing restarts because of a straggler: the gang trains, only slower, and the cause may be the data, the
script or a neighbour on the node.
"""

from __future__ import annotations

from holdfast_core.api import StragglerStatus, TrainingJobStatus, changed
from holdfast_core.ids import Worker
from holdfast_core.messages.bounds import MAX_STRAGGLERS
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
    the straggler again. A restart would otherwise repeat the Event about it.
    """
    steps = world.observed.job.spec.failure_policy.stragglers.effective_steps
    if has_no_gang(status) or not steps:
        return changed(status, stragglers=())
    state = world.coordinator
    if state is None or state.round != status.restart_round or status.restore_point is None:
        return status
    procs = world.observed.job.spec.procs_per_worker
    shown = tuple(
        _shown(world, straggler, Worker(straggler.rank // procs))
        for straggler in state.stragglers
        if straggler.rank < procs * len(world.members)
    )
    finished = -1 if state.progress is None else state.progress.first
    if finished < (status.restore_point.step or 0) + steps + _MEASURED_STEPS:
        found = {s.rank for s in shown}
        kept = (s for s in status.stragglers if s.rank not in found and _is_in_place(world, s))
        shown = tuple(sorted((*shown, *kept)[:MAX_STRAGGLERS], key=lambda s: s.rank))
    return changed(status, stragglers=shown)


def _is_in_place(world: World, straggler: StragglerStatus) -> bool:
    """Return whether the worker of a straggler is still a member, and on no other node."""
    member = world.member(straggler.worker)
    if member is None:
        return False
    return member.pod is None or member.pod.node in (None, straggler.node)


def _shown(world: World, straggler: Straggler, worker: Worker) -> StragglerStatus:
    member = world.member(worker)
    pod = None if member is None else member.pod
    return StragglerStatus(
        rank=straggler.rank,
        worker=worker,
        node=None if pod is None else pod.node,
        factor=straggler.factor,
        since_step=straggler.since,
        slow_part=straggler.slow_part,
    )


def straggler_events(before: TrainingJobStatus, after: TrainingJobStatus) -> list[EmitEvent]:
    """Return a Warning for each rank that is a straggler now, and a Normal Event for each that was one.

    The end of a round is no such change.
    """
    old, new = ({s.rank for s in status.stragglers} for status in (before, after))
    events = [
        EmitEvent(EventKind.WARNING, Reason.STRAGGLER, describe(s))
        for s in after.stragglers
        if s.rank not in old
    ]
    if has_no_gang(after) or before.restart_round != after.restart_round:
        return events
    return events + [
        EmitEvent(
            EventKind.NORMAL,
            Reason.STRAGGLER_RECOVERED,
            f"rank {s.rank} of worker {s.worker}{_on(s)} is no straggler any more",
        )
        for s in before.stragglers
        if s.rank not in new
    ]


def describe(straggler: StragglerStatus) -> str:
    """Describe a straggler in a sentence."""
    part = _PARTS.get(straggler.slow_part, straggler.slow_part)
    where = f"rank {straggler.rank} of worker {straggler.worker}{_on(straggler)}"
    return (
        f"{where} takes {straggler.factor:g} times as long for its part of a step as the median, {part}, "
        f"since step {straggler.since_step}"
    )


def _on(straggler: StragglerStatus) -> str:
    return "" if straggler.node is None else f" on node {straggler.node}"
