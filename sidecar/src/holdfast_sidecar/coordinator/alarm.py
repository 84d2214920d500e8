"""The coordinator's alarm for a gang that trains without commits.

While `CommitWatch` finds commits overdue, the coordinator's state lists a failure, the log has one line,
and a metric gives the seconds without a commit.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from holdfast_core.clock import Clock, stamp
from holdfast_core.ids import Level, Rank, TierName
from holdfast_core.messages.schema import Failure, Policy
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry
from holdfast_sidecar.coordinator.reports.gathered import Gathered
from holdfast_sidecar.coordinator.watchdog import CommitWatch, Overdue, interval_of

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
