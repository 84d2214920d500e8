"""What only a CheckpointAdoption has: its status, and the controller of its pods (ADR 0015). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_core.api import (
    CheckpointAdoption,
    CheckpointAdoptionStatus,
    JobCondition,
    TrainingJobStatus,
    changed,
)
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import OwnerView
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.pod import injection


def refusal(world: World) -> str | None:
    """Return why the pods may not become workers, or None.

    If all of them are deleted after one has failed, no copy would be left of any step.
    """
    owner = world.observed.owner
    if owner is None or not owner.loses_all_copies or world.spec.store is not None:
        return None
    return (
        f"{owner.cost}. This CheckpointAdoption has no object store, so each failure would lose all work: "
        f"set checkpoint.object in a new CheckpointAdoption, or {owner.remedy}"
    )


def with_adoption(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with what pods get at admission, and with condition Adopted."""
    if not isinstance(world.job, CheckpointAdoption) or not isinstance(
        status, CheckpointAdoptionStatus
    ):
        return status
    status = _with_injection(status, world, world.job)
    owner, kind = world.observed.owner, JobCondition.ADOPTED
    if owner is None:
        return status
    refused = refusal(world)
    reason = Reason.PODS_ADOPTED if refused is None else Reason.LOCAL_COPIES_WOULD_BE_LOST
    text = owner.cost if refused is None else refused
    return world.with_condition(status, kind, refused is None, reason, text)


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


_DEFAULT_BACKOFF_LIMIT = 6
"""spec.backoffLimit of a Job that does not set it."""
NO_OWNER = OwnerView(
    "no controller creates a lost pod of this gang again: create it yourself, or let a Job create it",
    loses_all_copies=False,
)
_LOST = "every copy in memory and on nodes is lost, and only a step in the object store is left"


def other_owner(kind: str, name: str) -> OwnerView:
    text = (
        f"{kind} {name} creates the pods, and Holdfast does not know its restart policy: if it deletes the "
        "remaining pods after a failure, only a step in the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)


def owner_of_job(raw: Mapping[str, Any]) -> OwnerView:
    """Return what the restart policy of a Job of batch/v1 costs."""
    meta, spec = raw["metadata"], raw.get("spec") or {}
    limit = spec.get("backoffLimit")
    limit = _DEFAULT_BACKOFF_LIMIT if limit is None else int(limit)
    job = f"Job {meta['name']} (backoffLimit {limit})"
    parent = next((r for r in meta.get("ownerReferences") or [] if r.get("controller")), None)
    if spec.get("backoffLimitPerIndex") is not None:
        return OwnerView(f"{job} creates a lost pod again, index by index", loses_all_copies=False)
    if limit == 0:
        end = "fails, which deletes the remaining pods"
        if parent is not None:
            end = f"fails, and {parent['kind']} {parent['name']} deletes all pods and creates them again"
        return OwnerView(
            f"when one pod fails, {job} {end}: {_LOST}",
            loses_all_copies=True,
            remedy="set a backoffLimit above 0 on the Jobs of the pods",
        )
    text = (
        f"{job} creates a lost pod again. After {limit} failed pods all pods are deleted, and only a step in "
        "the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)
