"""Facts about a gang whose number of workers changes (ADR 0101). Pure.

The present number is that of status.members, the wanted one is spec.workers. A number with which the ranks
failed before their first step is refused: the gang goes back to the number before, and the refused one is
tried again once spec.workers has changed.
"""

from __future__ import annotations

import signal

from holdfast_core.api import ResizeStatus, TrainingJobStatus
from holdfast_core.ids import RestartRound
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.evidence import own_failures, trained_since_restored
from holdfast_operator.decide.facts.failure import Failure, is_disruption
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.reasons import Reason


def is_refused(world: World) -> bool:
    """Return whether the gang has failed with the number of workers that the spec wants."""
    resize = world.status.resize
    return resize is not None and resize.refused_workers == world.observed.job.spec.workers


def is_asked_for(world: World) -> bool:
    """Return whether the spec wants another number of workers than the gang has, and it is not refused."""
    wanted = world.observed.job.spec.workers
    return bool(world.members) and wanted != len(world.members) and not is_refused(world)


def next_workers(world: World) -> int:
    """Return the number of workers of a gang that starts again with new pods."""
    return len(world.members) if is_refused(world) else world.observed.job.spec.workers


def resized(world: World, workers: int, round_: RestartRound) -> ResizeStatus | None:
    """Return status.resize of a round that begins with this number of workers.

    There is a way back to the number of workers that last trained, if they have committed a step.
    """
    old = world.status.resize
    if workers == len(world.members):
        return old
    before = len(world.members)
    if old is not None and old.from_workers is not None:
        before = old.from_workers
    untried = workers != before and readable.recorded_commit(world) is not None
    return ResizeStatus(round=round_, from_workers=before if untried else None)


def is_untried(status: TrainingJobStatus) -> bool:
    """Return whether no round has trained with the present number of workers since it changed."""
    return status.resize is not None and status.resize.from_workers is not None


def failed_first_start(world: World, failures: tuple[Failure, ...]) -> Failure | None:
    """Return the failure for which the gang goes back to the number of workers before, or None.

    The ranks have restored a checkpoint of another number of ranks, and failed by themselves or for want of
    memory before one of them had finished a step.
    """
    if not is_untried(world.status) or is_disruption(failures) or trained_since_restored(world):
        return None
    oom = next((f for f in failures if f.reason is Reason.OOM_KILLED), None)
    if oom is not None:
        return oom
    killed = (-signal.SIGKILL, -signal.SIGTERM)
    if any(f.exit_code in killed for f in failures):
        return None  # the ranks that failed beside it lost their peer
    own = own_failures(world)
    return next((f for f in failures if f.reason in own), None)
