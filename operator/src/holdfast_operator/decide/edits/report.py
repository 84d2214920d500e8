"""Report edits of the spec that a running gang does not have yet, or never gets. Pure."""

from __future__ import annotations

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
    reason, problems = Reason.SPEC_APPLIED, list[str]()
    for path, members in outdated(world).items():
        if len(members) < len(world.members) and path == TEMPLATE:
            reason = Reason.PODS_DIFFER
        elif reason is Reason.SPEC_APPLIED:
            reason = Reason.APPLIES_LATER
        problems.append(_moment(world, path, members))
    problem = _template_problem(world)
    if problem is not None:
        reason = Reason.INVALID_TEMPLATE
        problems.insert(0, problem)
    if not problems and status.condition(kind) is None:
        return status
    text = ". ".join(problems) or "the gang has the present spec"
    return status.with_condition(kind, not problems, reason, text, now.utc, job.generation)


def _moment(world: World, path: str, members: list[MemberState]) -> str:
    """Return which pods have an earlier value, and when they get the new one."""
    if path == RESTORE_FROM:
        return (
            f"{path} has changed: it is read only before the first checkpoint of a job, so this job does not "
            "read it again. Create another job to restore from it"
        )
    total = len(world.members)
    workers = first_of([str(m.worker) for m in members])
    mixed = ""
    if len(members) < total and path == TEMPLATE:
        mixed = ", so the gang runs with different templates, images included"
    return (
        f"{path} has changed: the pods of {len(members)} of {total} workers ({workers}) have an earlier "
        f"value{mixed}. A pod gets the present one when it is replaced. {_how_to_replace(world)}"
    )


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
    return f"no pod can be created from the present template: {why}"
