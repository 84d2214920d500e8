"""The interval between a job's saves, if it is given as a time. Pure.

With `auto`, ranks compute the interval from the measured cost of a save and the mean time between failures.
A rank begins again after each failure and cannot measure that time. The operator therefore estimates it when
a round begins, and keeps it in the status, because ROUND must not change while nothing else does.
"""

from __future__ import annotations

from holdfast_core.api import TrainingJobStatus, changed
from holdfast_core.messages.schema import Timing
from holdfast_operator.decide.facts.world import World


def timing(world: World) -> Timing | None:
    """Return the interval of this round as a time, or None if it is a number of steps."""
    interval = world.observed.job.spec.checkpoint.interval
    if interval.steps is not None:
        return None
    expected = world.status.expected_mtbf_seconds
    seconds = None if interval.seconds is None else float(interval.seconds)
    return Timing(seconds, interval.expected_mtbf_seconds if expected is None else expected)


def with_expected_failures(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of a round that begins, with the mean time between failures that it expects."""
    interval = world.observed.job.spec.checkpoint.interval
    if not interval.auto:
        return changed(status, expected_mtbf_seconds=None)
    trained = 0.0 if status.goodput is None else status.goodput.training_seconds
    mtbf_seconds = estimated_mtbf(interval.expected_mtbf_seconds, trained, status.restarts)
    return changed(status, expected_mtbf_seconds=mtbf_seconds)


def estimated_mtbf(expected_seconds: float, trained_seconds: float, restarts: int) -> float:
    """Return the estimated mean time between failures, in seconds.

    What the user expects counts as much as one failure after that time. The measurements of the job
    outweigh it after some failures, and one early failure does not make the gang save all the time.
    """
    return (expected_seconds + trained_seconds) / (1 + restarts)
