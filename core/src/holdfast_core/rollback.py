"""Whether a job can train again from one of its steps, as far as objects and the status say. Pure.

The operator asks before it carries out spec.rollback, and `kubectl holdfast restore` before it sets the
field. Both show the same text. Only the choice of the restore point knows what the nodes hold, so it may
still refuse a step that passes here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    Gang,
    on_lineage,
)
from holdfast_core.ids import Step, age_of
from holdfast_core.store_retention import quarantined


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a job cannot go back to a step, and what to do instead."""

    is_known: bool
    """Whether a checkpoint of the step exists, or did."""
    message: str


def find_unfit(
    gang: Gang, checkpoints: Iterable[Checkpoint], step: Step, on_nodes: Collection[Step] = ()
) -> Unfit | None:
    """Return why the job cannot go back to the step, or None if nothing that is known is against it.

    Args:
        checkpoints: The gang's own Checkpoints.
        on_nodes: Further steps of the present history that the nodes of the gang have.
    """
    objects = {id_: c for c in checkpoints if (id_ := c.id) is not None and id_.step == step}
    status, there = gang.status, f"-n {gang.namespace}"
    last = status.last_persisted
    known = {*objects} if last is None or last.step != step else {*objects, last.id}
    listed = f"`kubectl holdfast list {gang.name} {there}` lists the others"
    if not known:
        if step in on_nodes:
            return None
        return Unfit(False, f"no checkpoint of step {step} is known: {listed}")
    present = [id_ for id_ in known if on_lineage(id_, status.lineage)]
    if not present:
        old = max(known, key=age_of)
        text = (
            f"step {step} of round {old.round} is off the lineage, because the job went back to an older "
            f"step since. A fork trains from it: `kubectl holdfast restore {gang.name}@{step} {there} "
            "--to-new-job NAME`"
        )
        return Unfit(True, text)
    id_ = max(present, key=age_of)
    named, item = f"step {step} of round {id_.round}", objects.get(id_)
    # A drill marks the Checkpoint before the status of the job follows.
    by_drill = item is not None and item.status.is_true(CheckpointCondition.QUARANTINED)
    is_released = step in gang.spec.failure_policy.released_steps
    if id_ in quarantined(gang) or (by_drill and not is_released):
        text = f"{named} is quarantined: failurePolicy.releasedSteps releases it, or choose another one"
        return Unfit(True, f"{text}; {listed}")
    if id_ in status.missing:
        text = f"no place has a good copy of {named}: restore the objects of the store first"
        return Unfit(True, f"{text}; {listed}")
    phase = None if item is None else item.status.phase
    if item is not None and (item.deleting or phase is CheckpointPhase.DELETING):
        return Unfit(True, f"{named} is being deleted (Checkpoint {item.name}): {listed}")
    if item is not None and phase is not CheckpointPhase.COMMITTED:
        text = f"Checkpoint {item.name} has phase {phase or 'unknown'}, expected Committed"
        return Unfit(True, f"{text}: {listed}")
    return None
