"""State of this pod's own ranks and launcher in the current round, as they reported it.

The reporter sends it to the coordinator, and the starter bases its decisions on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast_core.ids import Rank, RestartRound, worker_of
from holdfast_core.messages.schema import (
    DeadRank,
    Exited,
    Interval,
    Ok,
    Progress,
    RankProgress,
    RankStack,
    Stacks,
    WorkerReport,
)

KILLED = -9


class LocalGang:
    """Record of the pod's ranks. A seal resets all but `running_round` and `ends`."""

    def __init__(self, procs_per_worker: int) -> None:
        self._procs_per_worker = procs_per_worker
        self.running_round: RestartRound | None = None
        """Round whose ranks the launcher runs now, if any."""
        self.progress: dict[Rank, RankProgress] = {}
        self.metrics: dict[Rank, dict[str, float]] = {}
        """What each rank's script has reported with its newest step."""
        self.dead: dict[Rank, DeadRank] = {}
        self.returned: set[Rank] = set()
        """Ranks that have exited with code 0."""
        self.done = False
        """Whether the launcher has sent Finish. It does not if the ranks stopped because the pod leaves."""
        self.ends = False
        """Whether the preStop hook of the pod has been called. No seal resets this."""
        self.intervals: dict[Rank, Interval] = {}
        """The interval between saves as each rank has reported it, if it is given as a time."""
        self.saves_skipped = 0
        """Saves that ranks skipped in this round because no slot was free."""
        self.waits_for_store: bool | None = None
        """`Ok.waits_for_store` of the reply to a report that the pod ends. None while there is none, and
        while the coordinator does not reply."""
        self.stacks_token = ""
        """The request of the coordinator that `stacks` is the reply to."""
        self.stacks: tuple[RankStack, ...] = ()

    def reset(self) -> None:
        self.progress = {}
        self.metrics = {}
        self.dead = {}
        self.returned = set()
        self.done = False
        self.intervals = {}
        self.saves_skipped = 0
        self.waits_for_store = None
        self.stacks_token, self.stacks = "", ()

    @property
    def may_save(self) -> bool:
        """Whether a rank of this pod can hand over another save."""
        return self.running_round is not None and not self.done

    @property
    def leaves(self) -> bool:
        """Whether the pod is ending and its ranks have stopped, without having returned for good."""
        return self.ends and not self.done and not self.may_save

    def replied(self, report: WorkerReport, reply: Ok) -> None:
        """Record the coordinator's reply to a report of the current round."""
        if report.ends:
            self.waits_for_store = reply.waits_for_store

    def stacked(self, message: Stacks) -> None:
        """Record where the launcher has found the pod's ranks."""
        self.stacks_token, self.stacks = message.token, message.ranks

    def trains(self, round_: RestartRound, ranks: range) -> bool:
        """Return whether all these ranks run in this round and have finished a step of it."""
        running = self.running_round == round_ and not self.dead and not self.returned
        return running and set(self.progress) == set(ranks)

    def progressed(self, message: Progress) -> None:
        """Record a rank's progress: its newest step and metrics, and the sum of its save costs."""
        before = self.progress.get(message.rank)
        blocked = message.blocked_seconds + (before.blocked_seconds if before else 0.0)
        now = RankProgress(
            message.rank,
            message.step,
            blocked,
            message.finished,
            message.step_seconds,
            message.paused,
            message.work,
        )
        if before is not None and before.step > message.step:
            now = replace(now, step=before.step)
        else:
            self.metrics[message.rank] = message.metrics
            if message.interval is not None:
                self.intervals[message.rank] = message.interval
        self.progress[message.rank] = now
        self.saves_skipped += message.saves_skipped

    def exited(self, message: Exited) -> None:
        """Record the end of a rank."""
        if message.code == 0:
            self.returned.add(message.rank)
        else:
            self.dead[message.rank] = DeadRank(
                message.rank,
                worker_of(message.rank, self._procs_per_worker),
                message.code,
                message.message[:2048],
                message.out_of_memory,
            )

    def launcher_lost(self, ranks: Iterable[Rank], why: str) -> None:
        """Record the ranks as killed that had not returned when their launcher ended.

        Ranks that had returned saved and stopped, because their pod leaves.
        """
        self.lost((rank for rank in ranks if rank not in self.returned), why)

    def lost(self, ranks: Iterable[Rank], why: str) -> None:
        """Record ranks as killed that ended together with the launcher, without reporting an exit code."""
        for rank in ranks:
            worker = worker_of(rank, self._procs_per_worker)
            self.dead.setdefault(rank, DeadRank(rank, worker, KILLED, why))
