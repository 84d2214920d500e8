"""Failures that count against the checkpoint that the round restored. Pure.

1. A restart counts against the checkpoint that its round had restored if ranks failed by themselves before
   one had finished a step. It counts for as long as the job restores or quarantines this checkpoint, also
   outside of failurePolicy.window.
2. After failurePolicy.quarantineAfter of them, CAS 1 of the next round quarantines the checkpoint, if an
   older one can be restored instead. Otherwise the gang tries again until its budget is spent.
3. If the older one fails as often, the cause is not the checkpoint: a data set or a licence server may be
   away. CAS 1 of the next round releases what was quarantined for it, and the newest is restored again.
   Nothing is quarantined until the gang has trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from holdfast_core.api import (
    JobCondition,
    RestartRecord,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import CheckpointId
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.world import World, back_to
from holdfast_operator.model.job import Now


def failed_from(world: World) -> CheckpointId | None:
    """Return the restore point if ranks that fail now may fail because of it, else None.

    They do not if one of them has finished a step.
    """
    point = world.status.restore_point
    if point is None or point.step is None or point.round is None or point.job_uid is not None:
        return None
    resize = world.status.resize
    if resize is not None and resize.from_workers is not None:
        return None  # the ranks may be unable to reshard it (facts/resize.py)
    return None if trained_since_restored(world) else CheckpointId(point.step, point.round)


def with_evidence(
    status: TrainingJobStatus, world: World, records: tuple[RestartRecord, ...], now: Now
) -> TrainingJobStatus:
    """Return the status in which the restore point is quarantined, or the checkpoints above it are released.

    Args:
        status: The status of the next round.
        records: The restarts, with the one that begins this round.
    """
    point = world.status.restore_point
    id_ = None if point is None else point.id
    if id_ is None or point is None or records[-1].failed_from != id_:
        return status
    counts = _counts(world, records)
    if _is_elsewhere(world, counts):
        return _released(status, counts)
    if not is_due(world, records[:-1], id_):
        return status
    return changed(status, quarantined=(*status.quarantined, id_))


def is_due(world: World, earlier: tuple[RestartRecord, ...], failed_from: CheckpointId) -> bool:
    """Return whether one more failure than the `earlier` ones quarantines this checkpoint."""
    policy = world.observed.job.spec.failure_policy
    counts = _counts(world, earlier)
    counts[failed_from] += 1
    if counts[failed_from] < policy.quarantine_after or _is_elsewhere(world, counts):
        return False
    if failed_from.step in policy.released_steps or failed_from in world.status.quarantined:
        return False
    return readable.has_older(world, failed_from)


def _counts(world: World, records: Iterable[RestartRecord]) -> Counter[CheckpointId]:
    """Count the failures from each checkpoint since the restore point was saved."""
    point = world.status.restore_point
    saved = -1 if point is None or point.round is None else point.round
    found = (r.failed_from for r in records if r.round > saved)
    return Counter(id_ for id_ in found if id_ is not None)


def _is_elsewhere(world: World, counts: Counter[CheckpointId]) -> bool:
    """Return whether gangs failed so often from several checkpoints that none of them is the cause."""
    after = world.observed.job.spec.failure_policy.quarantine_after
    return sum(n >= after for n in counts.values()) > 1


def _released(status: TrainingJobStatus, counts: Counter[CheckpointId]) -> TrainingJobStatus:
    """Return the status in which the newest of these checkpoints can be restored again.

    No rank has trained since they were quarantined.
    """
    newest = max(id_.step for id_ in counts)
    kept = tuple(q for q in status.quarantined if q not in counts)
    if kept == status.quarantined:
        return status
    return changed(
        status,
        quarantined=kept,
        lineage=back_to(newest, status.lineage),
        last_committed_step=newest,
    )


def trained_since_restored(world: World) -> bool:
    """Return whether a rank may have finished a step of this round, or none has been started."""
    point, state = world.status.restore_point, world.coordinator
    if point is None or state is None or world.status.is_true(JobCondition.RUNNING):
        return True
    return state.progress is not None and state.progress.last > (point.step or 0)
