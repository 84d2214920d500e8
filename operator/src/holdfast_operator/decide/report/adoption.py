"""The parts of a CheckpointAdoption's status that a TrainingJob does not have. Pure."""

from __future__ import annotations

from holdfast_core.api import (
    CheckpointAdoption,
    CheckpointAdoptionStatus,
    JobCondition,
    TrainingJobStatus,
    changed,
)
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.pod import injection


def refusal(world: World) -> str | None:
    """Return why the pods may not become workers, or None.

    If all of them are deleted after one has failed, no copy would be left of any step.
    """
    owner = world.observed.owner
    if owner is None or not owner.loses_all_copies or world.observed.job.spec.store is not None:
        return None
    return (
        f"{owner.cost}. This CheckpointAdoption has no object store, so each failure would lose all work: "
        f"set checkpoint.object in a new CheckpointAdoption, or {owner.remedy}"
    )


def with_adoption(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with what pods get at admission, and with condition Adopted."""
    job = world.observed.job
    if not isinstance(job, CheckpointAdoption) or not isinstance(status, CheckpointAdoptionStatus):
        return status
    status = _with_injection(status, world, job)
    owner, kind = world.observed.owner, JobCondition.ADOPTED
    if owner is None:
        return status
    refused = refusal(world)
    reason = Reason.PODS_ADOPTED if refused is None else Reason.LOCAL_COPIES_WOULD_BE_LOST
    text = owner.cost if refused is None else refused
    return status.with_condition(kind, refused is None, reason, text, now.utc, job.generation)


def _with_injection(
    status: CheckpointAdoptionStatus, world: World, job: CheckpointAdoption
) -> CheckpointAdoptionStatus:
    """Return the status with `injection` as the spec and the store are now.

    It is absent before the first round, and after the end of the gang: pods that come then are refused.
    """
    over = status.is_true(JobCondition.COMPLETE) or status.is_true(JobCondition.FAILED)
    if status.restart_round is None or over:
        return changed(status, injection=None)
    if job.spec.store is not None and world.observed.store is None:
        return status  # a pod without the store's configuration would never upload anything
    return changed(status, injection=injection(job, world.observed.store))
