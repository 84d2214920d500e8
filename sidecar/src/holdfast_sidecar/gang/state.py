"""State of this pod's own ranks and launcher in the current round, and what the ranks are notified of.

Ranks and launcher report their state. The reporter sends it to the coordinator, and the starter bases its
decisions on it. Ranks are notified of levels of their saves and of requests of the operator. A rank that
reconnects is sent the newest notices again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from holdfast_core.ids import Level, Rank, RestartRound, Step, worker_of
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    DeadRank,
    Exited,
    GangRequest,
    Interval,
    LevelReached,
    Ok,
    Progress,
    RankProgress,
    RankStack,
    SaveFailed,
    SaveRequested,
    Stacks,
    StopRequested,
    WorkerReport,
)
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.wire.intake import LocalConnection, LocalConnections
from holdfast_sidecar.wire.verbs import STOP

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


T = TypeVar("T")

_LEVELS_KEPT = 16


class RankNotices:
    """Notices of the current round to the ranks of this pod."""

    def __init__(self, current: Callable[[], RoundState], connections: LocalConnections) -> None:
        self._current = current
        self._connections = connections
        self._released = asyncio.Event()
        self._requests: list[SaveRequested | StopRequested] = []
        self._levels: dict[Step, LevelReached] = {}
        """The newest levels of this round."""
        self._overtaken: dict[Step, SaveFailed] = {}
        """The newest dropped steps of this round."""

    def level(self, reached: LevelReached) -> None:
        """Notify the ranks of a step's level."""
        self._reached(reached)
        if reached.level is Level.LOCAL:
            self._requests = [a for a in self._requests if isinstance(a, StopRequested)]

    def release(self) -> None:
        """End `released`: the pod may end."""
        self._released.set()

    def dropped(self, steps: tuple[Step, ...]) -> None:
        """Notify the ranks of pruned steps that have not reached level local. They never will."""
        for step in steps:
            if step in self._levels:
                continue
            failed = SaveFailed(
                step,
                self._current().round,
                Level.LOCAL,
                OVERTAKEN,
                "a newer step replaced it before it was on the node tiers",
            )
            _remember(self._overtaken, step, failed)
            for connection in self._ranks():
                connection.push(failed)

    def request(self, path: str, message: GangRequest) -> None:
        """Send a save-now or stop request to rank 0. It is kept for a rank 0 that connects later."""
        kind = StopRequested if path == STOP else SaveRequested
        request = kind(message.round, message.token)
        if request in self._requests:
            return
        self._requests.append(request)
        self._connections.push_rank(Rank(0), request)

    def repeat(self, connection: LocalConnection) -> None:
        """Send the newest notices to a rank that has connected again."""
        for reached in self._levels.values():
            self._push(connection, reached)
        for failed in self._overtaken.values():
            connection.push(failed)
        if connection.rank == 0:
            for request in self._requests:
                connection.push(request)

    async def released(self) -> None:
        """Wait until a plan releases the pod, or until the round is sealed."""
        await self._released.wait()

    def sealed(self) -> None:
        """Discard what belongs to the old round, and end its waits for the release."""
        released, self._released = self._released, asyncio.Event()
        released.set()
        self._requests = []
        self._levels = {}
        self._overtaken = {}

    def _reached(self, reached: LevelReached) -> None:
        _remember(self._levels, reached.step, reached)
        for connection in self._ranks():
            self._push(connection, reached)

    def _push(self, connection: LocalConnection, reached: LevelReached) -> None:
        """Push a level, and for a committed step of a job without a store that it is never persisted.

        A wait for that level would otherwise never end.
        """
        connection.push(reached)
        accepted = self._current().accepted
        if accepted is not None and not accepted.policy.has_object_tier:
            text = "the job has no object store; set spec.checkpoint.object"
            step, round_ = reached.step, reached.round
            connection.push(SaveFailed(step, round_, Level.PERSISTED, NO_OBJECT_TIER, text))

    def _ranks(self) -> list[LocalConnection]:
        ranks = self._connections.ranks
        return [ranks[Rank(r)] for r in self._current().own_ranks if Rank(r) in ranks]


def _remember(kept: dict[Step, T], step: Step, message: T) -> None:
    kept[step] = message
    while len(kept) > _LEVELS_KEPT:
        del kept[min(kept)]
