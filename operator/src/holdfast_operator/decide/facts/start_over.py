"""Whether a gang that has lost every checkpoint may start over, and what it loses by that. Pure.

The choice of the restore point comes here only when the loss is proved (restore_point.py): every pod that may
have held a shard is gone or has answered, no complete copy is left, and the object store, if there is one,
has answered that it has no checkpoint of the lineage. A node that is silent and a store that is down are
waited for: silence is no loss (ADR 0007).

1. The gang starts over by itself if it can have trained for failurePolicy.startOver.atMost at the longest.
   The time is a bound from stamps in the status: it also holds if no operator has run for hours.
2. Otherwise a person decides. startOver.confirmedRound names the newest round of the lineage. The round that
   starts over is the newest of the lineage from then on, so that one confirmation permits one start over,
   whatever is repeated.
3. Nothing is deleted. The lineage begins anew with the round, so that old shards which come back are never
   restored and never count as checkpoints of the new history.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.api import (
    LineageEntry,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Step
from holdfast_operator.decide.facts.world import World


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
    confirmed, lineage = world.spec.failure_policy.start_over.confirmed_round, world.status.lineage
    return confirmed is not None and bool(lineage) and lineage[-1].round == confirmed


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
