"""Report edits of the spec that a running gang does not have yet, or never gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_operator.decide.edits.outdated import outdated
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.template.isolation import find_breach
from holdfast_operator.model.template.parts import RESTORE_FROM, TEMPLATE
from holdfast_operator.model.template.shape import find_misfit
from holdfast_operator.model.wording import first_of


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
