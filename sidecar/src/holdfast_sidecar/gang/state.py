"""What this pod's own ranks and launcher are doing in the current round, as they said it.

Plain memory of facts; the reporter sends them to the coordinator, the starter decides by them.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import DeadRank, Exited, Progress, RankProgress

KILLED = -9


class LocalGang:
    """Reset at every new round; `running_round` survives, it is the launcher's word."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.running_round: RestartRound | None = None
        self.progress: dict[Rank, RankProgress] = {}
        self.dead: dict[Rank, DeadRank] = {}
        self.done = False
        self.saves_skipped = 0

    def reset(self) -> None:
        self.progress = {}
        self.dead = {}
        self.done = False
        self.saves_skipped = 0

    def progressed(self, message: Progress) -> None:
        """Costs of saving add up over the round; metrics and step are the newest."""
        before = self.progress.get(message.rank)
        blocked = message.blocked_seconds + (before.blocked_seconds if before else 0.0)
        now = RankProgress(message.rank, message.step, message.metrics, blocked)
        if before is not None and before.step > message.step:
            now = replace(before, blocked_seconds=blocked)
        self.progress[message.rank] = now
        self.saves_skipped += message.saves_skipped

    def exited(self, message: Exited) -> None:
        """Exit code 0 is no death: Finish follows when all ranks of the pod returned 0."""
        if message.code != 0:
            self.dead[message.rank] = DeadRank(
                message.rank, self._worker, message.code, message.message[:2048]
            )

    def lost(self, ranks: range, why: str) -> None:
        """The launcher and all its ranks are gone without a word about their exit codes."""
        for number in ranks:
            rank = Rank(number)
            self.dead.setdefault(rank, DeadRank(rank, self._worker, KILLED, why))
