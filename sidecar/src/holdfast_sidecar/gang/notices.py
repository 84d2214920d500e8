"""What this sidecar notifies its ranks of: levels of their saves, and requests of the operator.

A rank that reconnects is sent the newest notices again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from holdfast_core.ids import Level, Rank, Step
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    GangRequest,
    LevelReached,
    SaveFailed,
    SaveRequested,
    StopRequested,
)
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.wire.intake import LocalConnection, LocalConnections
from holdfast_sidecar.wire.verbs import STOP

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
