"""Combined reports of the members: the coordinator's view of everything but steps. There is no I/O here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast_core.ids import Rank, Step, TierName, Worker
from holdfast_core.messages.schema import (
    AcceptedRound,
    DeadRank,
    Failure,
    GangProgress,
    Interval,
    RankSaves,
    RankStack,
    WorkerReport,
)
from holdfast_sidecar.base.rounds import urgent_part, waiting_saves
from holdfast_sidecar.base.telemetry import FULL

_MAX_FAILURES = 64
_VALUED_STEPS = 1024
"""Steps of which the metrics are kept. An upload of hours may end so many saves later."""


def common_round(accepted: Sequence[AcceptedRound | None]) -> AcceptedRound | None:
    """Return the ROUND that all of these workers have accepted, with the highest of their versions.

    Args:
        accepted: What each worker has accepted. None: it has accepted no ROUND, or is silent.
    """
    known = [a for a in accepted if a is not None]
    if len(known) < len(accepted) or len({a.content for a in known}) != 1:
        return None
    return max(known, key=lambda a: a.version)


class Gathered:
    """Newest report of every worker of the round, and the times of the round's milestones.

    What is asked for at every report is counted as the reports come in, because a walk over all workers at
    each report of each worker would be quadratic.
    """

    def __init__(self, workers: frozenset[Worker], world_size: int, started: float) -> None:
        self.workers = workers
        self.world_size = world_size
        self.started = started
        """Monotonic seconds at which this coordinator first had the addresses of all members."""
        self.reports: dict[Worker, WorkerReport] = {}
        self.has_all = set[Worker]()
        """The workers that have sent all of their shards."""
        self.barrier_at: float | None = None
        self.first_step_at: float | None = None
        self._metrics: dict[Step, Mapping[str, float]] = {}
        """What rank 0 had reported when it saved a step, of the newest steps."""
        self._open = set[Worker]()
        self._done = set[Worker]()
        self._idle = set[Worker]()
        self._ending = set[Worker]()
        self._leaving = set[Worker]()
        self._full = set[Worker]()
        self._paused = set[Worker]()
        self._waiting = set[Worker]()
        self._dead = set[Worker]()
        self._received_at: dict[Worker, float] = {}
        self.steps_finished = 0
        """Steps that all ranks together have finished. Steps that are repeated count again."""
        self._steps = Counter[Step]()
        """Number of ranks whose newest finished step is this one."""

    def receive(self, report: WorkerReport, now: float) -> bool:
        """Store a member's report. Return whether it changes anything urgent, which is more than progress.

        Args:
            report: The report.
            now: Monotonic seconds.
        """
        worker, before = report.worker, self.reports.get(report.worker)
        self.reports[worker] = report
        for workers, holds in (
            (self._open, report.barrier_open),
            (self._done, report.done),
            (self._idle, report.idle),
            (self._ending, report.ends),
            (self._leaving, report.leaves),
            (self._full, any(f.reason in FULL for f in report.failures)),
            (self._paused, any(p.paused for p in report.progress)),
            (self._dead, bool(report.dead)),
            (self._waiting, bool(waiting_saves(report))),
        ):
            (workers.add if holds else workers.discard)(worker)
        self._metrics.update(report.step_metrics)
        while len(self._metrics) > _VALUED_STEPS:
            del self._metrics[min(self._metrics)]
        self._received_at[worker] = now
        if before is None or before.progress != report.progress:
            old = () if before is None else before.progress
            self._steps -= Counter(p.step for p in old)
            self.steps_finished -= sum(p.finished for p in old)
            self._steps.update(p.step for p in report.progress)
            self.steps_finished += sum(p.finished for p in report.progress)
        if self.barrier_at is None and len(self._open) == len(self.workers):
            self.barrier_at = now
        if self.first_step_at is None and self.running:
            self.first_step_at = now
        return before is None or urgent_part(before) != urgent_part(report)

    def metrics(self, step: Step) -> Mapping[str, float]:
        """Return what rank 0 had reported when it saved a step of this round."""
        return self._metrics.get(step, {})

    def saves(self, worker: Worker | None = None) -> dict[Rank, RankSaves]:
        """Return the saves of all ranks, or of the ranks of one worker only."""
        chosen = self.reports.values() if worker is None else (self.reports[worker],)
        return {entry.rank: entry for report in chosen for entry in report.saves}

    @property
    def waits(self) -> bool:
        """Whether a step waits in a slot of a rank."""
        return bool(self._waiting)

    @property
    def is_paused(self) -> bool:
        """Whether a rank has announced that it finishes no steps for now."""
        return bool(self._paused)

    @property
    def has_ended(self) -> bool:
        """Whether a rank has ended. Only the ranks of a whole worker are known to have ended with code 0."""
        return bool(self._dead or self._done)

    def all_reported_since(self, since: float) -> bool:
        """Return whether the newest report of every worker came after `since`, in monotonic seconds."""
        return len(self._received_at) == len(self.workers) and all(
            at >= since for at in self._received_at.values()
        )

    def accepted(self, since: float) -> AcceptedRound | None:
        """Return the ROUND that all workers have accepted, with the highest of their versions.

        None unless every worker has reported since then, and all have accepted the same content.

        Args:
            since: Monotonic seconds.
        """
        if not self.all_reported_since(since):
            return None
        return common_round([report.accepted for report in self.reports.values()])

    @property
    def step_seconds(self) -> list[float]:
        """The median step time of one rank of each worker, or [] until every worker has measured it.

        The ranks of a worker finish a step together.
        """
        first = (r.progress[0].step_seconds for r in self.reports.values() if r.progress)
        known = [seconds for seconds in first if seconds is not None]
        return known if len(known) == len(self.workers) else []

    @property
    def rank_steps(self) -> dict[Rank, int]:
        """Number of steps that each rank has finished."""
        return {p.rank: p.finished for r in self.reports.values() for p in r.progress}

    def stacks(self, token: str) -> dict[Rank, RankStack]:
        """Return the stacks that launchers have sent for this request."""
        return {
            s.rank: s for r in self.reports.values() if r.stacks_token == token for s in r.stacks
        }

    @property
    def pressed(self) -> bool:
        """Whether a node has no room for another shard or copy."""
        return bool(self._full)

    @property
    def progress(self) -> GangProgress | None:
        """How far the ranks are that have finished a step. None before the first."""
        if not self._steps:
            return None
        return GangProgress(
            first=min(self._steps),
            last=max(self._steps),
            total_steps=sum(step * ranks for step, ranks in self._steps.items()),
            blocked_seconds=max(
                p.blocked_seconds for r in self.reports.values() for p in r.progress
            ),
        )

    @property
    def interval(self) -> Interval | None:
        """The interval between saves as rank 0 has reported it, if it is given as a time."""
        report = self.reports.get(Worker(0))
        if report is None:
            return None
        return next((p.interval for p in report.progress if p.rank == 0), None)

    @property
    def finished(self) -> Step | None:
        """The newest step that every rank that trains has finished."""
        return min(self._steps, default=None)

    @property
    def running(self) -> bool:
        return self._steps.total() == self.world_size > 0

    @property
    def done(self) -> bool:
        return len(self._done) == len(self.workers)

    @property
    def idle(self) -> bool:
        return len(self._idle) == len(self.workers)

    @property
    def ending(self) -> frozenset[Worker]:
        """The workers whose pods are ending."""
        return frozenset(self._ending)

    @property
    def leaves(self) -> bool:
        """Whether a pod is ending whose ranks have stopped."""
        return bool(self._leaving)

    def stays(self, workers: Iterable[Worker]) -> bool:
        """Return whether the pod of one of these workers is not ending."""
        return any(worker not in self._ending for worker in workers)

    @property
    def dead(self) -> tuple[DeadRank, ...]:
        found: dict[Rank, DeadRank] = {d.rank: d for r in self.reports.values() for d in r.dead}
        return tuple(found[r] for r in sorted(found))

    @property
    def failures(self) -> tuple[Failure, ...]:
        found = [replace(f, worker=r.worker) for r in self.reports.values() for f in r.failures]
        return tuple(dict.fromkeys(found))[:_MAX_FAILURES]

    @property
    def cannot_restore(self) -> str:
        wrong = sorted((w, r.cannot_restore) for w, r in self.reports.items() if r.cannot_restore)
        return "\n".join(f"worker {worker}: {text}" for worker, text in wrong)[:4000]

    @property
    def restore_may_succeed(self) -> bool:
        failed = [r for r in self.reports.values() if r.cannot_restore]
        return bool(failed) and all(r.restore_may_succeed for r in failed)

    @property
    def saves_skipped(self) -> int:
        return sum(p.saves_skipped for r in self.reports.values() for p in r.progress)

    @property
    def restored_from(self) -> dict[TierName, int] | None:
        """Number of ranks by tier. None before every worker has its shards."""
        if self.rehydrate_seconds is None:
            return None
        return dict(Counter(t for r in self.reports.values() for t in r.restored_from))

    @property
    def rehydrate_seconds(self) -> float | None:
        """The longest rehydration of a worker, or None before every worker has its shards."""
        known = [
            r.rehydrate_seconds for r in self.reports.values() if r.rehydrate_seconds is not None
        ]
        return max(known) if len(known) == len(self.workers) else None

    @property
    def rendezvous_seconds(self) -> float | None:
        """From the begin of this coordinator until the barrier was open on every worker."""
        return None if self.barrier_at is None else self.barrier_at - self.started

    @property
    def first_step_seconds(self) -> float | None:
        """From the open barrier until every rank had finished a step."""
        if self.first_step_at is None or self.barrier_at is None:
            return None
        return max(0.0, self.first_step_at - self.barrier_at)
