"""When a gang starts from an older step than the newest: a person rolls it back, or it starts over. Pure.

Both are orders in one field, spec.rollback, which names the newest round of the lineage. The round that
carries an order out is the newest of the lineage from then on, so that one order permits one return, whatever
is repeated. Nothing is deleted: what is given up is off the lineage, and retention takes it.

An order with a step rolls the gang back:

1. Nothing happens while the step cannot be restored (holdfast_core.rollback). Condition RolledBack says why,
   and the gang trains on.
2. The next round begins (writes.roll_back), unless the present one still has no restore point. The choice of
   its restore point (restore_point.py) takes the step if it is complete. Otherwise it takes the newest one as
   usual, and the order is void.
3. The lineage records the step that the gang had reached. Ranks learn it until a round starts from this step
   or a later one, so that a script can skip the batches that spoiled the training.

An order without a step permits a start over. The choice of the restore point comes here only when the loss
is proved: every pod that may have held a shard is gone or has answered, no complete copy is left, and the
object store, if there is one, has answered that it has no checkpoint of the lineage. A node that is silent
and a store that is down are waited for: silence is no loss (ADR 0007). The gang starts over by itself if it
can have trained for failurePolicy.startOver.atMost at the longest. The time is a bound from stamps in the
status: it also holds if no operator has run for hours. The lineage begins anew with the round, so that old
shards which come back are never restored and never count as checkpoints of the new history.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.api import (
    JobCondition,
    LineageEntry,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.api.training_job import RollbackSpec
from holdfast_core.ids import RestartRound, Step
from holdfast_core.rollback import find_unfit
from holdfast_operator.decide.facts.world import Note, World
from holdfast_operator.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class Loss:
    """What a start over gives up."""

    steps: int
    seconds: float
    """Longest time in which the gang can have trained them."""

    def __str__(self) -> str:
        time = f"{self.seconds:.0f} s" if self.seconds < 120 else f"{self.seconds / 60:.0f} min"
        return f"{self.steps} steps, at most {time} of training"


def loss(world: World, committed: Step) -> Loss:
    """Return what is lost if the gang starts from the beginning, where this step was committed."""
    status = world.status
    newest = max(committed, status.step or 0)
    # A lineage that begins with another job's checkpoint may have two entries of its first round.
    first = [e.base for e in status.lineage if e.round == status.lineage[0].round]
    begun_at = first[-1].step if first and first[-1] is not None else 0
    return Loss(max(0, newest - begun_at), status.trained_seconds or 0.0)


def is_confirmed(world: World) -> bool:
    """Return whether a person has given up what the gang has trained up to its newest round."""
    order = world.spec.rollback
    return order is not None and order.step is None and order.stands(world.status.lineage)


def ordered(world: World) -> RollbackSpec | None:
    """Return the order to go back to a step that no round has carried out yet, or None."""
    order = world.spec.rollback
    stands = order is not None and order.step is not None and order.stands(world.status.lineage)
    return order if stands else None


def obstacle(world: World, step: Step) -> Note | None:
    """Return why no round may begin to go back to this step now, or None."""
    point, status = world.status.restore_point, world.status
    restored = point.step if point is not None and point.job_uid is None else None
    on_nodes = {s for s in (restored, world.local_step, world.copied_step) if s is not None}
    unfit = find_unfit(world.job, world.own_checkpoints, step, on_nodes)
    if unfit is not None:
        reason = Reason.CHECKPOINT_NOT_RESTORABLE if unfit.is_known else Reason.CHECKPOINT_NOT_FOUND
        return Note(reason, f"spec.rollback is not carried out: {unfit.message}")
    health = status.condition(JobCondition.REMOTE_TIER_HEALTHY)
    if health is not None and health.is_false and step not in on_nodes:
        text = f"the rollback to step {step} waits for the object store, and the gang trains on"
        return Note(Reason.WAITING_FOR_STORE, f"{text}: {health.message}")
    return None


def reached(world: World, point: RestorePointStatus, *, by_order: bool) -> Step | None:
    """Return the step that the gang had reached before it was rolled back, for the round with this start.

    None: it was not rolled back, or the round does not start below that step.

    Args:
        by_order: Whether this start carries out an order.
    """
    lineage = world.status.lineage
    before = lineage[-1].rolled_back_from if lineage else None
    steps = [s for s in (before, world.status.step if by_order else None) if s is not None]
    newest = max(steps, default=None)
    if newest is None or point.step is None or point.job_uid is not None or newest <= point.step:
        return None
    return newest


def is_small(world: World, lost: Loss) -> bool:
    """Return whether the operator may start the gang over by itself.

    A status without the time was written by an operator that did not measure it.
    """
    limit = world.spec.failure_policy.start_over.limit.total_seconds()
    return world.status.trained_seconds is not None and limit > 0 and lost.seconds <= limit


def with_trained(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of a round that begins (CAS 1), with the time for which the gang can have trained."""
    before, since = status.trained_seconds, status.chosen_at
    if since is None or before is None:
        return status
    seconds = before + world.now.at_most_seconds(since)
    return changed(status, trained_seconds=seconds, chosen_at=None)


def with_chosen(
    status: TrainingJobStatus, world: World, point: RestorePointStatus
) -> TrainingJobStatus:
    """Return the status of CAS 2, from which on the gang may train."""
    own = point.step is not None and point.job_uid is None
    before = status.trained_seconds if own else 0.0
    return changed(status, trained_seconds=before, chosen_at=world.now.utc)


def first_round(lineage: tuple[LineageEntry, ...]) -> RestartRound:
    """Return the round with which the lineage begins: no checkpoint of an older round belongs to it."""
    return max((e.round for e in lineage if e.base is None), default=RestartRound(0))
