"""Combined reports of the members: the coordinator's view of everything but steps. There is no I/O here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from holdfast_core.ids import Rank, Worker
from holdfast_core.messages.schema import (
    DeadRank,
    Failure,
    RankProgress,
    RankSaves,
    RankTiers,
    RoundTimes,
    WorkerReport,
)
from holdfast_sidecar.base.failures import FULL

_MAX_FAILURES = 64


@dataclass(slots=True)
class Gathered:
    """Newest report of every worker of the round, and the times of the round's milestones."""

    workers: frozenset[Worker]
    world_size: int
    started: float
    """Monotonic seconds at which this coordinator first had the addresses of all members."""
    reports: dict[Worker, WorkerReport] = field(default_factory=dict)
    barrier_at: float | None = None
    first_step_at: float | None = None

    def receive(self, report: WorkerReport, now: float) -> bool:
        """Store a member's report. Return whether it changes anything urgent, which is more than progress.

        Args:
            now: Monotonic seconds.
        """
        before = self.reports.get(report.worker)
        self.reports[report.worker] = report
        if self.barrier_at is None and self._all(lambda r: r.barrier_open):
            self.barrier_at = now
        if self.first_step_at is None and self.running:
            self.first_step_at = now
        if before is None:
            return True
        return _urgent(before) != _urgent(report)

    def saves(self, instance: str) -> dict[Rank, RankSaves]:
        """Return the saves of the ranks whose worker has sent this coordinator everything it had to send.

        Args:
            instance: Identity of this coordinator, which such a report names in `reported_to`.
        """
        return {
            entry.rank: entry
            for report in self.reports.values()
            if report.reported_to == instance
            for entry in report.saves
        }

    @property
    def pressed(self) -> bool:
        """Whether a node has no room for another shard or copy."""
        return any(f.reason in FULL for r in self.reports.values() for f in r.failures)

    @property
    def _complete(self) -> bool:
        return self.reports.keys() >= self.workers

    def _all(self, condition: Callable[[WorkerReport], bool]) -> bool:
        return self._complete and all(condition(self.reports[w]) for w in self.workers)

    @property
    def progress(self) -> tuple[RankProgress, ...]:
        found = [p for r in self.reports.values() for p in r.progress]
        return tuple(sorted(found, key=lambda p: p.rank))

    @property
    def running(self) -> bool:
        return len({p.rank for p in self.progress}) == self.world_size > 0

    @property
    def done(self) -> bool:
        return self._all(lambda r: r.done)

    @property
    def idle(self) -> bool:
        return self._all(lambda r: r.idle)

    @property
    def dead(self) -> tuple[DeadRank, ...]:
        found: dict[Rank, DeadRank] = {d.rank: d for r in self.reports.values() for d in r.dead}
        return tuple(found[r] for r in sorted(found))

    @property
    def failures(self) -> tuple[Failure, ...]:
        found = [replace(f, worker=r.worker) for r in self.reports.values() for f in r.failures]
        return tuple(dict.fromkeys(found))[:_MAX_FAILURES]

    @property
    def tiers(self) -> tuple[RankTiers, ...]:
        return tuple(
            sorted((t for r in self.reports.values() for t in r.tiers), key=lambda t: t.rank)
        )

    @property
    def cannot_restore(self) -> str:
        wrong = [
            f"worker {w}: {r.cannot_restore}"
            for w, r in sorted(self.reports.items())
            if r.cannot_restore
        ]
        return "\n".join(wrong)[:4000]

    @property
    def saves_skipped(self) -> int:
        return sum(r.saves_skipped for r in self.reports.values())

    @property
    def times(self) -> RoundTimes:
        known = [
            r.rehydrate_seconds for r in self.reports.values() if r.rehydrate_seconds is not None
        ]
        rehydrated = max(known) if len(known) == len(self.workers) else None
        barrier = None if self.barrier_at is None else self.barrier_at - self.started
        first = (
            None
            if self.first_step_at is None or self.barrier_at is None
            else max(0.0, self.first_step_at - self.barrier_at)
        )
        return RoundTimes(rehydrated, barrier, first)


def _urgent(report: WorkerReport) -> tuple[object, ...]:
    return (
        report.dead,
        report.failures,
        report.rehydrate_seconds,
        report.barrier_open,
        report.cannot_restore,
        report.done,
        report.idle and report.done,
        bool(report.progress),
    )
