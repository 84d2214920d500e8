"""Apply the retention to the Checkpoint objects of a job, which say what the object store has. Pure.

The operator prunes by this plan, and `kubectl holdfast prune` shows it. A checkpoint is deleted in two steps,
each in a pass of its own:

1. The Checkpoint gets phase Deleting. From then on no job may name it in spec.restoreFrom.
2. The data is deleted, unless something needs the checkpoint again. A job that chose it before step 1 is
   known by then, because the same process reads jobs and Checkpoints in the order of their changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import datetime

from holdfast_core.api import Checkpoint, CheckpointPhase, Gang, JobCondition, on_lineage
from holdfast_core.ids import CheckpointId, JobUid, Level, age_of
from holdfast_core.retention import (
    Committed,
    RetentionPlan,
    RetentionReason,
    RetentionState,
    plan_retention,
)
from holdfast_core.sources import NoSource


def is_stored(checkpoint: Checkpoint) -> bool:
    """Return whether the object store has the checkpoint, and no deletion of it has begun."""
    committed = checkpoint.status.phase is CheckpointPhase.COMMITTED
    return committed and checkpoint.persisted and not checkpoint.deleting


def newest_record(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the newest Checkpoint that records a commit. Its status has the job's present whenDeleted."""
    records = [(age_of(id_), c.name, c) for c in checkpoints if (id_ := c.id) is not None]
    return max(records, key=lambda r: r[:2])[2] if records else None


def needs_source(gang: Gang) -> bool:
    """Return whether a gang may still read the checkpoint of its spec.restoreFrom.

    It may until it has a checkpoint of its own in the store: the loss of all its nodes leads back there.
    """
    status = gang.status
    own = status.last_persisted is not None or status.completion_time is not None
    return gang.spec.restore_from is not None and not own and not gang.deleting


def cloned_of(
    gangs: Iterable[Gang],
    but: JobUid,
    find: Callable[[Gang], Checkpoint | NoSource],
) -> frozenset[str]:
    """Return the names of the Checkpoints from which gangs start, but for the gang of this uid.

    Args:
        gangs: Those that may start from a Checkpoint of one namespace.
        find: Returns the Checkpoint for which spec.restoreFrom of a gang stands if that names a job.
    """
    found: set[str] = set()
    for gang in gangs:
        if gang.uid == but or not needs_source(gang):
            continue
        name = gang.spec.source_checkpoint or find(gang).name
        if name is not None:
            found.add(name)
    return frozenset(found)


def quarantined(gang: Gang) -> frozenset[CheckpointId]:
    """Return the checkpoints that the gang does not restore."""
    released = gang.spec.failure_policy.released_steps
    return frozenset(q for q in gang.status.quarantined if q.step not in released)


def restored_instead(
    gang: Gang | None, checkpoints: Iterable[Checkpoint], but: CheckpointId
) -> Checkpoint | None:
    """Return the newest checkpoint in the object store that the gang would restore if not `but`, or None.

    Args:
        gang: The gang, or None if it is gone: then its lineage is not known.
        checkpoints: The gang's own Checkpoints.
    """
    apart = frozenset[CheckpointId]() if gang is None else quarantined(gang)
    found = [
        c
        for c in checkpoints
        if is_stored(c) and (id_ := c.id) is not None and id_ not in apart and id_ != but
        if not c.damaged and (gang is None or on_lineage(id_, gang.status.lineage))
    ]
    return max(found, key=lambda c: (c.spec.step or 0, c.status.round or 0), default=None)


def needed_in_store(
    gang: Gang, checkpoints: Iterable[Checkpoint], cloned: Collection[str]
) -> dict[RetentionReason, Collection[CheckpointId]]:
    """Return the checkpoints of a gang that must stay in the object store, by reason.

    Sidecars protect steps, not rounds. So all checkpoints of a step stay that is pinned, quarantined or
    restored: the sidecars would refuse the delete in each pass, and others would wait behind it.

    Args:
        checkpoints: The gang's own Checkpoints.
        cloned: Names of the Checkpoints from which other jobs start.
    """
    known = [(id_, c) for c in checkpoints if (id_ := c.id) is not None]
    last, point = gang.status.last_persisted, gang.status.restore_point
    start = None if point is None or point.job_uid is not None else point.id
    order = gang.spec.rollback
    wanted = order.step if order is not None and order.stands(gang.status.lineage) else None

    def of_steps(named: Collection[CheckpointId]) -> set[CheckpointId]:
        steps = {id_.step for id_ in named}
        return {*named, *(id_ for id_, _ in known if id_.step in steps)}

    back = {id_ for id_, c in known if id_.step == wanted and is_stored(c)}
    return {
        RetentionReason.PINNED: of_steps([id_ for id_, c in known if c.spec.pin]),
        RetentionReason.CLONED: [id_ for id_, c in known if c.name in cloned],
        RetentionReason.QUARANTINED: of_steps(quarantined(gang)),
        RetentionReason.RESTORE_POINT: of_steps([] if start is None else [start]) | back,
        RetentionReason.NEWEST_PERSISTED: [] if last is None else [last.id],
    }


def plan_store(
    gang: Gang,
    checkpoints: Iterable[Checkpoint],
    cloned: Collection[str],
    now: datetime,
) -> RetentionPlan:
    """Return a verdict on every checkpoint that the object store has of a gang.

    Nothing is pruned while the store lacks a checkpoint that it had: it would count as one of those that are
    kept.

    Args:
        checkpoints: The gang's own Checkpoints. Two objects may record one checkpoint.
        cloned: Names of the Checkpoints from which other jobs start.
        now: The present time.
    """
    own = tuple(checkpoints)
    stored = {id_: c for c in own if is_stored(c) and (id_ := c.id) is not None}
    lineage = gang.status.lineage
    committed = tuple(
        Committed(
            id_, Level.PERSISTED, c.status.committed_at, c.status.metrics, on_lineage(id_, lineage)
        )
        for id_, c in stored.items()
    )
    return plan_retention(
        RetentionState(
            committed=committed,
            policy=gang.spec.checkpoint.retention.policy,
            needed=needed_in_store(gang, own, cloned),
            now=now,
            protecting_level=Level.PERSISTED,
            held=gang.status.is_true(JobCondition.CHECKPOINT_MISSING),
        )
    )


def pruned_by(
    plan: RetentionPlan, checkpoints: Iterable[Checkpoint]
) -> list[tuple[Checkpoint, RetentionReason]]:
    """Return the stored Checkpoints that a plan prunes, each with the reason."""
    reasons = {verdict.checkpoint: verdict.reason for verdict in plan.prune}
    return [
        (c, reasons[id_])
        for c in checkpoints
        if is_stored(c) and (id_ := c.id) is not None and id_ in reasons
    ]
