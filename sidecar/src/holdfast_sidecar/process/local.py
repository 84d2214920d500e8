"""Handler of the messages that the launcher and the ranks send on the pod's socket."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from holdfast_core.errors import FormatError, RefusedError
from holdfast_core.ids import Level, Rank, Step
from holdfast_core.messages.schema import (
    OVERTAKEN,
    Ask,
    Ended,
    Exited,
    Fill,
    Finish,
    FinishReply,
    HelloReply,
    LevelNotice,
    LevelReached,
    LocalRole,
    Progress,
    Refusal,
    Restore,
    SaveFailed,
    SaveRequested,
    Stage,
    StopRequested,
    StoreAddress,
)
from holdfast_core.pacing.background import bytes_each_step
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.rounds import RoundState, fence
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.process.parts import Parts
from holdfast_sidecar.save.flow import own_shard
from holdfast_sidecar.save.slot_writes import Outcome
from holdfast_sidecar.wire.intake import Connection
from holdfast_sidecar.wire.verbs import STOP

T = TypeVar("T")

_LEVELS_KEPT = 16
_LAST_WORDS_SECONDS = 5.0
"""Seconds that Finish waits for the ranks' connections to end."""


class Local:
    """The intake's `LocalHandler`. `parts` must be set before the socket opens."""

    parts: Parts

    def __init__(self) -> None:
        self._tasks = Tasks()
        self._released = asyncio.Event()
        self._asked: list[SaveRequested | StopRequested] = []
        self._levels: dict[Step, LevelReached] = {}
        """The newest levels of this round, which are sent again to a rank that reconnects."""
        self._overtaken: dict[Step, SaveFailed] = {}
        """The newest dropped steps of this round, which are sent again to a rank that reconnects."""

    @property
    def state(self) -> RoundState:
        return self.parts.keeper.state

    # ------------------------------------------------------------------ connections

    def hello(self, connection: Connection) -> HelloReply:
        state = self.state
        hello = connection.hello
        if hello is not None:
            # These pushes follow the reply, because the other side waits for it before it reads pushes.
            if hello.role is LocalRole.LAUNCHER:
                self._tasks.soon(lambda: self.parts.starter.hello(hello), "launcher hello")
            else:
                self._tasks.soon(lambda: self._tell_again(connection), "rank hello")
        return HelloReply(state.round, None if state.held is None else state.held.policy)

    def gone(self, connection: Connection) -> None:
        hello = connection.hello
        if hello is not None and hello.role is LocalRole.LAUNCHER:
            if self.parts.intake.launcher is None:
                self.parts.starter.gone(connection)
            self.parts.reporter.changed()

    # ------------------------------------------------------------------ requests

    async def request(self, connection: Connection, message: Any) -> Any:
        match message:
            case Stage():
                return await self.parts.stager.stage(self.parts.keeper.current, message)
            case Restore():
                return await self.parts.filler.restore(self.state, message)
            case Fill():
                return await self.parts.filler.fill(self.state, message)
            case Finish():
                return await self._finish(message)
            case _:
                raise FormatError(f"{type(message).__name__} is not a request of this socket")

    async def _finish(self, message: Finish) -> FinishReply:
        """Reply once the gang's last step has reached its levels and the operator has recorded it.

        Raises:
            RefusedError: The round is not, or no longer, the current one.
        """
        refused = fence(self.state, message.round)
        if refused is not None:
            raise RefusedError(refused.code, refused.message)
        # The ranks have exited, but their last Progress may still be unread on their own connections. It must
        # be in the state that reports `finished`, because the operator takes that state as the last one.
        if not await self.parts.intake.ranks_ended(_LAST_WORDS_SECONDS):
            logs.warning(
                "a connection of a rank is still open although the rank has ended",
                seconds=_LAST_WORDS_SECONDS,
            )
        refused = fence(self.state, message.round)
        if refused is not None:
            raise RefusedError(refused.code, refused.message)
        self.parts.gang.done = True
        self.parts.pacing.hurry()
        self.parts.reporter.changed()
        released = self._released
        await released.wait()
        if self.state.round != message.round:
            raise RefusedError(Refusal.STALE_ROUND, f"round {message.round} has been sealed")
        return FinishReply(True)

    # ------------------------------------------------------------------ pushes

    def notify(self, connection: Connection, message: Any) -> None:
        parts = self.parts
        match message:
            case Progress() if message.round == self.state.round and self._own(message.rank):
                parts.gang.progressed(message)
                parts.metrics.trained(message.round)
                if message.rank == self.state.own_ranks[0]:
                    # The ranks of a gang finish a step together, so the reports of one of them suffice.
                    parts.pacing.step_done(message.step, message.blocked_seconds)
                    parts.metrics.limited(parts.pacing.limit)
                parts.metrics.stalled(message.blocked_seconds, message.saves_skipped)
            case Exited() if message.round == self.state.round and self._own(message.rank):
                parts.gang.exited(message)
            case Ended():
                parts.starter.ended(message.round)
                parts.starter.evaluate()
            case StoreAddress():
                parts.starter.store_address(message)
            case Progress() | Exited():
                return  # These are of another round or pod: ranks of an older round are being ended.
            case _:
                raise FormatError(f"{type(message).__name__} is not a push message of this socket")
        parts.reporter.changed()

    def _own(self, rank: Rank) -> bool:
        return rank in self.state.own_ranks

    # ------------------------------------------------------------------ from the other components

    def staged(self, outcome: Outcome) -> None:
        """Handle the end of a slot's write: push a failure to the rank, or add the shard to the flow."""
        if outcome.failed is not None:
            self.parts.intake.push_rank(outcome.stage.rank, outcome.failed)
        elif (
            outcome.record is not None
            and self.state.held is not None
            and outcome.record.header.round == self.state.round
        ):
            self._expect_saves(outcome.record.header.payload_bytes)
            self.parts.flow.add(own_shard(outcome.record))
        self.parts.reporter.changed()

    def _expect_saves(self, payload_bytes: int) -> None:
        state = self.state
        if state.held is not None:
            policy = state.held.policy
            each_step = bytes_each_step(
                payload_bytes * len(state.own_ranks),
                policy.interval_steps,
                len(state.copy_targets()),
                policy.object_every_steps,
            )
            self.parts.pacing.expect(each_step)

    def in_memory(self, steps: tuple[Step, ...]) -> None:
        """Notify the ranks that these steps have reached level memory."""
        for step in steps:
            self._reached(LevelReached(step, self.state.round, Level.MEMORY))

    def dropped(self, steps: tuple[Step, ...]) -> None:
        """Notify the ranks of pruned steps that have not reached level local. They never will."""
        for step in steps:
            reached = self._levels.get(step)
            if reached is not None and reached.level is not Level.MEMORY:
                continue
            failed = SaveFailed(
                step,
                self.state.round,
                Level.MEMORY if reached is None else Level.LOCAL,
                OVERTAKEN,
                "a newer step replaced it before it was on the node tiers",
            )
            _remember(self._overtaken, step, failed)
            for connection in self._ranks():
                connection.push(failed)

    def level(self, message: LevelNotice) -> None:
        """Notify the ranks of a step's level, or let Finish reply if the notice releases the pod."""
        if message.released:
            self._released.set()
            return
        self._reached(LevelReached(message.step, message.step_round, message.level))
        if message.level is Level.LOCAL:
            self._asked = [a for a in self._asked if isinstance(a, StopRequested)]

    def _reached(self, reached: LevelReached) -> None:
        before = self._levels.get(reached.step)
        if before is not None and reached.level is Level.MEMORY:
            return  # The notice is late: one of this level or a higher one has arrived before.
        _remember(self._levels, reached.step, reached)
        for connection in self._ranks():
            connection.push(reached)

    def _ranks(self) -> list[Connection]:
        ranks = self.parts.intake.ranks
        return [ranks[Rank(r)] for r in self.state.own_ranks if Rank(r) in ranks]

    def ask(self, path: str, message: Ask) -> None:
        """Send a save-now or stop request to rank 0. It is kept for a rank 0 that connects later."""
        kind = StopRequested if path == STOP else SaveRequested
        request = kind(message.round, message.token)
        if request in self._asked:
            return
        self._asked.append(request)
        self.parts.intake.push_rank(Rank(0), request)

    def _tell_again(self, connection: Connection) -> None:
        for reached in self._levels.values():
            connection.push(reached)
        for failed in self._overtaken.values():
            connection.push(failed)
        if connection.rank == 0:
            for request in self._asked:
                connection.push(request)

    def sealed(self) -> None:
        """Discard what belongs to the old round. A Finish that waits is refused."""
        released, self._released = self._released, asyncio.Event()
        released.set()
        self._asked = []
        self._levels = {}
        self._overtaken = {}


def _remember(said: dict[Step, T], step: Step, message: T) -> None:
    said[step] = message
    while len(said) > _LEVELS_KEPT:
        del said[min(said)]
