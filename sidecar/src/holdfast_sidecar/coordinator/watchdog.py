"""Detection of training that continues while no step is committed. It uses no I/O and no clock.

Each part of the sidecar reports its own failures. The watchdog finds what no part reports: saves that never
arrive, or that a part delays without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.ids import Step
from holdfast_core.messages.schema import Interval, Policy


@dataclass(frozen=True, slots=True)
class Overdue:
    """No step was committed for too long."""

    since: float
    """Monotonic seconds of the last commit or, if there is none, of the first step of the round."""
    seconds: float
    steps: int
    """Steps that every rank has finished since then."""
    intervals: int


@dataclass(frozen=True, slots=True)
class CommitInterval:
    """Steps or seconds between two saves."""

    steps: int = 1
    """Steps between two saves at least."""
    seconds: float | None = None
    """Seconds between two saves. None: the interval is a number of steps."""

    def passed(self, steps: int, seconds: float) -> int:
        """Return how many intervals are over after so many steps and seconds."""
        by_steps = steps // max(1, self.steps)
        return by_steps if self.seconds is None else min(by_steps, int(seconds / self.seconds))


def interval_of(policy: Policy, reported: Interval | None) -> CommitInterval:
    """Return the interval between the gang's saves.

    Seconds become steps only on rank 0, which reports them after its first steps. An automatic interval that
    is not reported counts as the mean time between failures, because it is never longer.

    Args:
        policy: Policy of the round.
        reported: What rank 0 has reported.
    """
    timing = policy.timing
    if timing is None:
        return CommitInterval(policy.interval_steps)
    if timing.seconds is not None:
        return CommitInterval(seconds=timing.seconds)
    known = None if reported is None else reported.seconds
    return CommitInterval(seconds=max(1.0, timing.mtbf_seconds if known is None else known))


class CommitWatch:
    """Comparison of the gang's finished steps with its commits.

    Commits are overdue only if both bounds are reached, because healthy jobs reach each of them alone: many
    intervals where steps take milliseconds and the disk cannot follow, many seconds where steps take minutes.
    """

    def __init__(self, *, intervals: int, seconds: float) -> None:
        self._intervals = intervals
        self._seconds = seconds
        self._step: Step | None = None
        """Newest step that every rank had finished at the last commit."""
        self._since = 0.0
        self._committed: Step | None = None

    def look(
        self, finished: Step | None, committed: Step | None, interval: CommitInterval, now: float
    ) -> Overdue | None:
        """Return by how much commits are overdue now, or None if they are not.

        Args:
            finished: The newest step that every rank has finished; None before the first.
            committed: The newest step of the round at level local.
            interval: The interval between saves.
            now: Monotonic seconds.
        """
        if finished is None:
            return None
        if self._step is None or committed != self._committed or finished < self._step:
            self._step, self._since, self._committed = finished, now, committed
        steps, seconds = finished - self._step, now - self._since
        intervals = interval.passed(steps, seconds)
        if intervals < self._intervals or seconds < self._seconds:
            return None
        return Overdue(self._since, seconds, steps, intervals)
