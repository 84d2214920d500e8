"""Failures that count against the checkpoint that the round restored. Pure."""

from __future__ import annotations

import signal

from holdfast_core.api import JobCondition
from holdfast_core.ids import CheckpointId
from holdfast_operator.decide.facts.failure import Failure
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.reasons import Reason


def failed_from_restore_point(world: World, failures: tuple[Failure, ...]) -> CheckpointId | None:
    """Return the restore point if ranks failed by themselves before one had finished a step, else None.

    Ranks that were killed from outside or ran out of memory do not count, because such an end is no evidence
    against the checkpoint that they restored. Nor does a store or a member that is away while the checkpoint
    is read: the same would happen to an older checkpoint.
    """
    point = world.status.restore_point
    if point is None or point.step is None or point.round is None or point.job_uid is not None:
        return None
    resize = world.status.resize
    if resize is not None and resize.from_workers is not None:
        return None  # the ranks may be unable to reshard it (facts/resize.py)
    if trained_since_restored(world):
        return None
    killed = (-signal.SIGKILL, -signal.SIGTERM)
    if any(f.reason is Reason.OOM_KILLED or f.exit_code in killed for f in failures):
        return None  # the ranks that failed beside it lost their peer
    own = own_failures(world)
    failed = any(f.reason in own for f in failures)
    return CheckpointId(point.step, point.round) if failed else None


def trained_since_restored(world: World) -> bool:
    """Return whether a rank may have finished a step of this round, or none has been started."""
    point, state = world.status.restore_point, world.coordinator
    if point is None or state is None or world.status.is_true(JobCondition.RUNNING):
        return True
    return state.progress is not None and state.progress.last > (point.step or 0)


def own_failures(world: World) -> frozenset[Reason]:
    """Return the reasons of failures that the gang itself causes, and no store or member that is away."""
    state = world.coordinator
    own = {Reason.RANK_FAILED}
    if state is not None and not state.restore_may_succeed:
        own.add(Reason.RESTORE_FAILED)
    return frozenset(own)
