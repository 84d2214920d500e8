"""Tells the coordinator what lies in this pod's memory only, whenever that changes.

The whole of it each time, so that neither a lost message nor another order of two can leave the
coordinator with something that is not there any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import Digest, Step
from holdfast_core.messages.schema import Holding, HoldingReply, RankHolding, Round
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.backoff import Backoff
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.save.layouts import RankLayouts
from holdfast_sidecar.save.staging import Stager
from holdfast_sidecar.wire.client import Peers


class HoldTeller:
    """`on_drop` hears the steps that the coordinator does not want any more."""

    def __init__(
        self,
        settings: Settings,
        current: Callable[[], RoundState],
        stager: Stager,
        layouts: RankLayouts,
        peers: Peers,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._current = current
        self._stager = stager
        self._layouts = layouts
        self._peers = peers
        self._clock = clock
        self._tasks = Tasks()
        self._changed = asyncio.Event()
        self.on_drop: Callable[[frozenset[Step]], None] = lambda steps: None
        """Set once what prunes exists."""

    def start(self) -> None:
        self._tasks.spawn(self._run(), "holding")

    async def close(self) -> None:
        await self._tasks.cancel()

    def wake(self) -> None:
        """What is held has changed."""
        self._changed.set()

    async def _run(self) -> None:
        settings = self._settings
        backoff = Backoff(settings.backoff_first_seconds, settings.backoff_last_seconds)
        said = logs.Changed()
        while True:
            await self._changed.wait()
            self._changed.clear()
            state = self._current()
            holding = self._stager.untold
            if state.held is None or holding is None or not self._stager.has_coordinator:
                continue
            audience = self._stager.audience
            try:
                reply = await self._tell(state.held, holding)
            except HoldfastError as error:
                said.say("holding", str(error), round=state.round)
                self._changed.set()
                await self._clock.sleep(backoff.next_seconds())
                continue
            backoff.reset()
            said.healthy("holding")
            if self._current().round == state.round and self._stager.audience == audience:
                self._stager.told(holding)
                if reply.drop:
                    self.on_drop(frozenset(reply.drop))

    async def _tell(self, held: Round, holding: tuple[RankHolding, ...]) -> HoldingReply:
        message = Holding(held.round, self._settings.contract.worker, holding)
        reply = await self._peers.call(held.coordinator, message, HoldingReply)
        if reply.need_layouts:
            layouts = await self._documents(reply.need_layouts)
            message = Holding(message.round, message.worker, holding, layouts)
            reply = await self._peers.call(held.coordinator, message, HoldingReply)
            if reply.need_layouts:
                raise UnavailableError(f"the coordinator does not keep {len(layouts)} layouts")
        return reply

    async def _documents(self, digests: tuple[Digest, ...]) -> tuple[str, ...]:
        return tuple([await self._layouts.text(digest) for digest in digests])
