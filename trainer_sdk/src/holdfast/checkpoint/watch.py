"""Detects that saves are made but none of them becomes durable. The caller passes the time."""

from __future__ import annotations

from holdfast_core.ids import Step

STALLED_SAVES = 5
STALLED_SECONDS = 60.0


class StallCounter:
    """Counter of the saves since the last one became durable.

    A stall is at least `STALLED_SAVES` saves (failed and skipped saves included) during at least
    `STALLED_SECONDS`. The number alone is not enough: with a slow disk and a short interval, more saves
    than that are skipped between two commits.
    """

    def __init__(self) -> None:
        self.last_committed: Step | None = None
        self.saves_since_commit = 0
        self._since: float | None = None
        self._reported = False

    def saved(self, now: float) -> None:
        """Count a save that was handed over, failed or was skipped. `now` is in monotonic seconds."""
        if self._since is None:
            self._since = now
        self.saves_since_commit += 1

    def committed(self, step: Step, now: float) -> None:
        """Record that the save of `step` became durable, and start to count anew."""
        if self.last_committed is None or step > self.last_committed:
            self.last_committed = step
        self.saves_since_commit = 0
        self._since = now
        self._reported = False

    def stalled_seconds(self, now: float) -> float | None:
        """Return for how long no save became durable, once for each stall; otherwise None."""
        if self._reported or self._since is None or self.saves_since_commit < STALLED_SAVES:
            return None
        seconds = now - self._since
        if seconds < STALLED_SECONDS:
            return None
        self._reported = True
        return seconds
