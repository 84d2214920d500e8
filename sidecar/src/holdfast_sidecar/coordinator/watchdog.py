"""Detection of training that continues while no step is committed. It uses no I/O and no clock.

Each part of the sidecar reports its own failures. The watchdog finds what no part reports: saves that never
arrive, or that a part delays without an error.

While `CommitWatch` finds commits overdue, the coordinator's state lists a failure, the log has one line,
and a metric gives the seconds without a commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from holdfast_core.clock import Clock, stamp
from holdfast_core.ids import Level, Rank, Step, TierName
from holdfast_core.messages.schema import Failure, Interval, Policy
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry


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


NO_COMMIT = "NoCommitForTooLong"
_SUBJECT = "commits"
_SHOWN_RANKS = 8


class CommitAlarm:
    """Alarm that is active while commits are overdue."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        gathered: Gathered,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._gathered = gathered
        self._clock = clock
        self._failures = Failures(on_change)
        self._watch = CommitWatch(
            intervals=settings.no_commit_intervals, seconds=settings.no_commit_seconds
        )
        self.seconds = 0.0
        """Seconds since the last commit or the round's first step while commits are overdue, else 0."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        return self._failures.current

    def look(self, policy: Policy) -> None:
        """Update the alarm from the current reports and commits. Call this after each report of a member."""
        gathered, newest = self._gathered, self._ledger.newest(Level.LOCAL)
        overdue = None
        if gathered.running and not gathered.done:
            committed = None if newest is None else newest.step
            now = self._clock.monotonic()
            overdue = self._watch.look(
                gathered.finished, committed, interval_of(policy, gathered.interval), now
            )
        if overdue is None:
            self.seconds = 0.0
            self._failures.healthy(_SUBJECT)
            return
        self.seconds = overdue.seconds
        step = None if newest is None else newest.step
        self._failures.note_text(
            _SUBJECT, TierName.NODE, NO_COMMIT, self._text(overdue, newest), step=step
        )

    def _text(self, overdue: Overdue, newest: StepEntry | None) -> str:
        since = stamp(self._clock.utc_now() - timedelta(seconds=overdue.seconds))
        last = "no step of this round" if newest is None else f"no step after {newest.step}"
        return (
            f"{last} was committed since {since}, while every rank finished {overdue.steps} steps "
            f"({overdue.intervals} intervals of saves): {self._missing(newest)}"
        )

    def _missing(self, newest: StepEntry | None) -> str:
        """Describe what the newest uncommitted step waits for."""
        floor = -1 if newest is None else newest.step
        waiting = [e for e in self._ledger.steps.values() if e.step > floor and not e.local]
        entry = max(waiting, key=lambda e: e.step, default=None)
        if entry is None:
            return (
                "no rank has written a newer step; check the trainers' logs for failed saves, and "
                "the nodes' disks if saves are skipped"
            )
        ranks = [Rank(r) for r in range(entry.world_size) if Rank(r) not in entry.durable]
        shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
        if not ranks:
            return (
                f"all shards of step {entry.step} are durable, but some workers do not have its "
                "manifest"
            )
        return (
            f"step {entry.step} waits for {len(ranks)} of {entry.world_size} ranks (rank {shown}); "
            "check the logs of their sidecars and trainers"
        )
