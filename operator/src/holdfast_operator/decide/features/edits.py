"""Edits of the spec of a gang that runs: which of them its pods lack, and when they get them. Pure.

Pods that were created from an earlier spec are replaced if no rank ran in them. Condition SpecApplied reports
the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_core.ids import Worker
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import Action, Delete, EmitEvent, EventKind
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.template.isolation import find_breach
from holdfast_operator.model.template.parts import RESTORE_FROM, TEMPLATE, part_digests
from holdfast_operator.model.template.shape import find_misfit
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


# --------------------------------------------------------------------------- the condition


def with_spec_applied(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with condition SpecApplied. A job that was never edited does not get it."""
    kind, job = JobCondition.SPEC_APPLIED, world.observed.job
    if status.restart_round is None or status.completion_time is not None:
        return status
    found = outdated(world)
    reason, problems = Reason.SPEC_APPLIED, list[str]()
    problem = _template_problem(world)
    if problem is not None:
        reason = Reason.INVALID_TEMPLATE
        problems.append(problem)
    elif found:
        reason = Reason.PODS_DIFFER if _differ(world, found) else Reason.APPLIES_LATER
    problems.extend(_moments(world, found, replaceable=problem is None))
    if not problems and status.condition(kind) is None:
        return status
    text = ". ".join(problems) or "the gang has the present spec"
    return status.with_condition(kind, not problems, reason, text, now.utc, job.generation)


def _differ(world: World, found: Mapping[str, list[MemberState]]) -> bool:
    """Return whether some pods have an earlier template and others the present one."""
    return 0 < len(found.get(TEMPLATE, ())) < len(world.members)


def _moments(
    world: World, found: Mapping[str, list[MemberState]], *, replaceable: bool
) -> list[str]:
    """Return which pods have earlier values, and when they get the present ones.

    Args:
        replaceable: Whether pods can be created from the present template.
    """
    total, problems = len(world.members), list[str]()
    parts = {path: members for path, members in found.items() if path != RESTORE_FROM}
    named = [
        f"{path} ({len(members)} of {total} workers: {first_of([m.worker for m in members])})"
        for path, members in parts.items()
    ]
    if named:
        problems.append(f"pods have earlier values of {', '.join(named)}")
        if _differ(world, found):
            problems.append("The gang runs with different templates, images included")
        problems.append("A pod gets the present values when it is replaced")
        if replaceable:
            problems.append(_how_to_replace(world))
    if RESTORE_FROM in found:
        problems.append(
            f"{RESTORE_FROM} has changed: it is read only before the first checkpoint of a job, so this job "
            "does not read it again. Create another job to restore from it"
        )
    return problems


def _how_to_replace(world: World) -> str:
    if world.observed.job.spec.store is None:
        return (
            "To replace all pods, delete one after the other, each when all ranks train again: without an "
            "object store the job cannot be suspended"
        )
    return "To replace all pods, set spec.suspend to true, and to false when the job is suspended"


def _template_problem(world: World) -> str | None:
    """Return why no pod can be created from the present template, or None."""
    template = world.observed.job.spec.template
    if template is None:
        return None
    found = find_misfit(template) or find_breach(template)
    if found is None and world.observed.template_refusal is None:
        return None
    why = str(found or f"the API server refuses it: {world.observed.template_refusal}")
    return (
        f"no pod can be created from the present template: {why}. Correct spec.template before you suspend "
        "the job or delete a pod, because no pod would come back"
    )
