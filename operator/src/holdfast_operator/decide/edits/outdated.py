"""Find the pods that were created from an earlier spec, and replace those in which no rank ran. Pure."""

from __future__ import annotations

from holdfast_core.ids import Worker
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import Action, Delete, EmitEvent, EventKind
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.template.parts import TEMPLATE, part_digests
from holdfast_operator.model.wording import first_of


def outdated(world: World) -> dict[str, list[MemberState]]:
    """Return the members whose pods have an earlier value, by the path of each part of the spec.

    A pod without the digest of a part, such as one of an earlier release or of another controller, is not
    among them.
    """
    found: dict[str, list[MemberState]] = {}
    present = part_digests(world.observed.job)
    for member in world.members:
        if member.pod is None:
            continue
        for path, digest in member.pod.rendered_from:
            if path in present and present[path] != digest:
                found.setdefault(path, []).append(member)
    return found


def replacements(world: World) -> list[Action]:
    """Return deletes of the pods that have an earlier template and in which no rank ever ran.

    A user has probably corrected the template because of them. A pod of this round that has not started is
    created again in this round, and another one in the next round. A pod whose sidecar may hold the last copy
    of a committed step stays.

    The caller has checked that a pod can be created from the present template.
    """
    state = world.coordinator
    if state is not None and state.running:
        return []
    idle = [
        m
        for m in outdated(world).get(TEMPLATE, [])
        if m.pod is not None and m.pod.alive and not m.pod.trainer_ran and not m.node_lost
    ]
    holders = [m.worker for m in idle if not world.awaits_start(m)]
    if holders and not _may_go(world, holders):
        idle = [m for m in idle if world.awaits_start(m)]
    pods = [m.pod for m in idle if m.pod is not None]
    if not pods:
        return []
    names = first_of([p.name for p in pods])
    text = f"spec.template has changed, and no rank ever ran in {names}: created again from the new one"
    deletes = [Delete(kinds.POD, p.name, p.uid, "spec.template has changed") for p in pods]
    return [*deletes, EmitEvent(EventKind.NORMAL, Reason.TEMPLATE_CHANGED, text)]


def _may_go(world: World, workers: list[Worker]) -> bool:
    """Return whether no committed step can be lost with these pods."""
    status = world.status
    if status.step is None and status.last_committed_step is None and status.restore_point:
        point = status.restore_point
        if point.step is None or point.job_uid is not None:
            return True  # the gang has not trained yet
    return readable.answering_can_be_replaced(world, workers)
