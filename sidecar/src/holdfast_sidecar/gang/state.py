"""State of this pod's own ranks and launcher in the current round, as they reported it.

The reporter sends it to the coordinator, and the starter bases its decisions on it.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import DeadRank, Exited, Progress, RankProgress

KILLED = -9


class LocalGang:
    """Record of the pod's ranks. A seal resets all but `running_round`, which depends on the launcher."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.running_round: RestartRound | None = None
        """Round whose ranks the launcher runs now, if any."""
        self.progress: dict[Rank, RankProgress] = {}
        self.metrics: dict[Rank, dict[str, float]] = {}
        """What each rank's script has reported with its newest step."""
        self.dead: dict[Rank, DeadRank] = {}
        self.done = False
        """Whether all ranks of the pod have exited with code 0."""
        self.saves_skipped = 0
        """Saves that ranks skipped in this round because no slot was free."""

    def reset(self) -> None:
        self.progress = {}
        self.metrics = {}
        self.dead = {}
        self.done = False
        self.saves_skipped = 0

    def progressed(self, message: Progress) -> None:
        """Record a rank's progress: its newest step and metrics, and the sum of its save costs."""
        before = self.progress.get(message.rank)
        blocked = message.blocked_seconds + (before.blocked_seconds if before else 0.0)
        now = RankProgress(message.rank, message.step, blocked)
        if before is not None and before.step > message.step:
            now = replace(before, blocked_seconds=blocked)
        else:
            self.metrics[message.rank] = message.metrics
        self.progress[message.rank] = now
        self.saves_skipped += message.saves_skipped

    def exited(self, message: Exited) -> None:
        """Record a rank that exited with an error.

        Exit code 0 is not recorded: Finish follows when all ranks of the pod have exited with 0.
        """
        if message.code != 0:
            self.dead[message.rank] = DeadRank(
                message.rank, self._worker, message.code, message.message[:2048]
            )

    def lost(self, ranks: range, why: str) -> None:
        """Record ranks as killed that ended together with the launcher, without reporting an exit code."""
        for number in ranks:
            rank = Rank(number)
            self.dead.setdefault(rank, DeadRank(rank, self._worker, KILLED, why))
