"""Notices that training goes on while nothing is committed any more. No I/O, no clock.

Each part of the sidecar reports what fails in it. The watchdog sees what none of them reports: saves
that never arrive, or that a part holds up without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.ids import Step


@dataclass(frozen=True, slots=True)
class Overdue:
    """No step was committed for too long."""

    since: float
    """Monotonic seconds: the last commit, or the first step of the round."""
    seconds: float
    steps: int
    """Steps that every rank has finished since then."""
    intervals: int


class CommitWatch:
    """Compares the steps of the gang with its commits.

    Both bounds must be passed, because each alone is met by healthy jobs: many intervals by steps of
    milliseconds that a disk cannot follow, many seconds by steps that take minutes.
    """

    def __init__(self, *, intervals: int, seconds: float) -> None:
        self._intervals = intervals
        self._seconds = seconds
        self._step: Step | None = None
        """What the gang had finished at the last commit."""
        self._since = 0.0
        self._committed: Step | None = None

    def look(
        self, finished: Step | None, committed: Step | None, interval_steps: int, now: float
    ) -> Overdue | None:
        """What is overdue now, or None.

        Args:
            finished: The newest step that every rank has finished; None before the first.
            committed: The newest step of the round at level local.
            interval_steps: Steps between two saves.
            now: Monotonic seconds.
        """
        if finished is None:
            return None
        if self._step is None or committed != self._committed or finished < self._step:
            self._step, self._since, self._committed = finished, now, committed
        steps, seconds = finished - self._step, now - self._since
        intervals = steps // max(1, interval_steps)
        if intervals < self._intervals or seconds < self._seconds:
            return None
        return Overdue(self._since, seconds, steps, intervals)
