"""Checkpoints from which no gang trained: they are kept, and the gang restores an older one. Pure.

1. A restart counts against the checkpoint that its round had restored if ranks failed by themselves before
   one had finished a step (evidence.failed_from_restore_point). It counts for as long as the job restores
   this checkpoint, also outside of failurePolicy.window.
2. After failurePolicy.quarantineAfter of them, CAS 1 of the next round quarantines the checkpoint.
3. The choice of a restore point, retention and the sidecars read status.quarantined. Nothing else decides.
4. A step in failurePolicy.releasedSteps is not quarantined. Quarantine ends with the job.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.api import (
    MAX_QUARANTINED,
    QuarantinedCheckpoint,
    RestartRecord,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import CheckpointId
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import Now


def quarantined(world: World) -> frozenset[CheckpointId]:
    """Return the checkpoints that the gang does not restore."""
    released = world.observed.job.spec.failure_policy.released_steps
    return frozenset(q.id for q in world.status.quarantined if q.step not in released)


def with_released(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status without the checkpoints that a user has released."""
    released = world.observed.job.spec.failure_policy.released_steps
    kept = tuple(q for q in status.quarantined if q.step not in released)
    return status if kept == status.quarantined else changed(status, quarantined=kept)


def with_failed_restore_point(
    status: TrainingJobStatus, world: World, records: tuple[RestartRecord, ...], now: Now
) -> TrainingJobStatus:
    """Return the status in which the restore point is quarantined if it failed too often.

    Args:
        status: The status of the next round.
        records: The restarts, with the one that begins this round.
    """
    point = world.status.restore_point
    id_ = None if point is None else point.id
    if id_ is None or point is None or records[-1].failed_from != id_:
        return status
    if not is_due(world, records[:-1], id_):
        return status
    failed = sum(1 for r in records if r.failed_from == id_)
    new = QuarantinedCheckpoint(
        step=id_.step, round=id_.round, manifest=point.manifest, at=now.utc, restarts=failed
    )
    return changed(status, quarantined=(*status.quarantined, new))


def is_due(world: World, earlier: Iterable[RestartRecord], failed_from: CheckpointId) -> bool:
    """Return whether one more failure than the `earlier` ones quarantines this checkpoint."""
    policy = world.observed.job.spec.failure_policy
    failed = 1 + sum(1 for r in earlier if r.failed_from == failed_from)
    known = {q.id for q in world.status.quarantined}
    released = failed_from.step in policy.released_steps
    return failed >= policy.quarantine_after and not released and failed_from not in known


def is_full(status: TrainingJobStatus) -> bool:
    """Return whether no further checkpoint can be quarantined."""
    return len(status.quarantined) >= MAX_QUARANTINED
