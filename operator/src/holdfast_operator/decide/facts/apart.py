"""Checkpoints that are set apart: quarantined, or missing. Pure.

Quarantined: gangs that restored the checkpoint failed.
1. evidence.py decides which restarts count against a checkpoint, and when it is quarantined or released.
2. The choice of a restore point, retention and the sidecars read status.quarantined. Nothing else decides.
3. A step in failurePolicy.releasedSteps is not quarantined. Quarantine ends with the job.

Missing: the status names the checkpoint, and it cannot be read anywhere. A bucket that was emptied, a
lifecycle rule or a wrong prefix takes checkpoints away. That is no evidence against them, and a restart does
not bring them back.
1. The restore point is missing if every place has replied to a sidecar that it has no good copy. A place that
   does not answer may have one (CoordinatorState.restore_may_succeed).
2. The coordinator compares the newest persisted checkpoint with the store (newest_is_stored), and reports a
   failure with reason CheckpointMissing while the store does not have it.
3. status.missing lists the restore points that were missing, until the gang trains. They are restored only if
   no other checkpoint is complete. The newest of them is then waited for: sidecars look for it until they
   find it, so no new round is necessary.
"""

from __future__ import annotations

from holdfast_core.api import (
    MAX_MISSING,
    MAX_QUARANTINED,
    JobCondition,
    PersistedStep,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import CheckpointId
from holdfast_operator.decide.facts.world import World, back_to
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason


def quarantined(world: World) -> frozenset[CheckpointId]:
    """Return the checkpoints that the gang does not restore."""
    released = world.observed.job.spec.failure_policy.released_steps
    return frozenset(q for q in world.status.quarantined if q.step not in released)


def with_released(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status without the checkpoints that a user has released."""
    released = world.observed.job.spec.failure_policy.released_steps
    kept = tuple(q for q in status.quarantined if q.step not in released)
    return status if kept == status.quarantined else changed(status, quarantined=kept)


def is_full(status: TrainingJobStatus) -> bool:
    """Return whether no further checkpoint can be quarantined."""
    return len(status.quarantined) >= MAX_QUARANTINED


# --------------------------------------------------------------------------- missing


def restore_point_is_missing(world: World) -> bool:
    """Return whether no place has a good copy of a part of the restore point."""
    state = world.coordinator
    return state is not None and bool(state.cannot_restore) and not state.restore_may_succeed


def restore_point_is_there(world: World) -> bool:
    """Return whether every worker has its shards of the restore point."""
    state = world.coordinator
    return state is not None and not state.cannot_restore and state.restored_from is not None


def newest_is_missing(world: World) -> str | None:
    """Return the coordinator's report that the store lacks the newest persisted checkpoint, or None."""
    state = world.coordinator
    if state is None or state.newest_is_stored is not False:
        return None
    found = (f.message for f in state.failures if f.reason == Reason.CHECKPOINT_MISSING)
    return next(found, "the object store does not have the newest persisted checkpoint")


def missing_ids(world: World) -> frozenset[CheckpointId]:
    """Return the checkpoints that are restored only if no other one is complete."""
    return frozenset(world.status.missing)


def stored(world: World) -> PersistedStep | None:
    """Return the newest persisted checkpoint, or None if there is none or the store may lack it.

    What follows from it may delete pods, which then have the only copies. While condition CheckpointMissing
    is true, only a step that this round has persisted or compared is sure: a new round has not compared
    anything yet.
    """
    last = world.last_persisted
    if last is None or last.id in missing_ids(world) or newest_is_missing(world) is not None:
        return None
    state = world.coordinator
    compared = state is not None and bool(state.newest_is_stored)
    was_missing = world.status.is_true(JobCondition.CHECKPOINT_MISSING)
    return None if was_missing and last.round < world.round and not compared else last


def with_missing_restore_point(
    status: TrainingJobStatus, world: World, now: Now
) -> TrainingJobStatus:
    """Return the status of the next round, in which the restore point of this one is listed as missing.

    No rank has trained from this restore point. So the next round may also restore a newer checkpoint.
    """
    point = None if status.restore_point is None else status.restore_point.id
    if point is None:
        return status
    known = status.missing
    if point not in known:
        known = (*known, point)
    newest = max(m.step for m in known)
    return changed(status, missing=known[-MAX_MISSING:], lineage=back_to(newest, status.lineage))
