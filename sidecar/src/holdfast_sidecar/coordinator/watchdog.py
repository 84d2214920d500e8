"""Detection of training that continues while no step is committed. It uses no I/O and no clock.

Each part of the sidecar reports its own failures. The watchdog finds what no part reports: saves that never
arrive, or that a part delays without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.ids import Step


@dataclass(frozen=True, slots=True)
class Overdue:
    """No step was committed for too long."""

    since: float
    """Monotonic seconds of the last commit or, if there is none, of the first step of the round."""
    seconds: float
    steps: int
    """Steps that every rank has finished since then."""
    intervals: int


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
        self, finished: Step | None, committed: Step | None, interval_steps: int, now: float
    ) -> Overdue | None:
        """Return by how much commits are overdue now, or None if they are not.

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
