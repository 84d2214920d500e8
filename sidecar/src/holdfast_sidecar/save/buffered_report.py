"""Send BUFFERED to the coordinator whenever the set of steps that this pod buffers in memory changes.

Each message carries the whole set. A lost or reordered message can therefore not leave the coordinator
with an entry that this pod no longer buffers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Step
from holdfast_core.messages.schema import Buffered, BufferedReply, RankBuffered, Round
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.save.layouts import RankLayouts
from holdfast_sidecar.save.staging import Stager
from holdfast_sidecar.wire.client import Peers


class BufferedReporter:
    """Sender of BUFFERED. `on_drop` is called with the steps that the coordinator has pruned."""

    def __init__(
        self,
        pod: Pod,
        stager: Stager,
        layouts: RankLayouts,
        peers: Peers,
        on_drop: Callable[[frozenset[Step]], None],
    ) -> None:
        self._pod = pod
        self._stager = stager
        self._layouts = layouts
        self._peers = peers
        self._on_drop = on_drop
        self._tasks = Tasks()
        self._changed = asyncio.Event()

    def start(self) -> None:
        self._tasks.spawn(self._run(), "buffered")

    async def close(self) -> None:
        await self._tasks.cancel()

    def wake(self) -> None:
        """Send again, because the set of buffered steps has changed or the coordinator is ready for it."""
        self._changed.set()

    async def _run(self) -> None:
        backoff = self._pod.backoff()
        changes = logs.Changed()
        while True:
            await self._changed.wait()
            self._changed.clear()
            state = self._pod.state
            buffered = self._stager.unreported
            if state.accepted is None or buffered is None or not self._stager.has_coordinator:
                continue
            coordinator_epoch = self._stager.coordinator_epoch
            try:
                reply = await self._report(state.accepted, buffered)
            except HoldfastError as error:
                changes.log("buffered", str(error), round=state.round)
                self._changed.set()
                await self._pod.clock.sleep(backoff.next_seconds())
                continue
            backoff.reset()
            changes.healthy("buffered")
            if (
                self._pod.state.round == state.round
                and self._stager.coordinator_epoch == coordinator_epoch
            ):
                self._stager.mark_reported(buffered)
                if reply.drop:
                    self._on_drop(frozenset(reply.drop))

    async def _report(self, accepted: Round, buffered: tuple[RankBuffered, ...]) -> BufferedReply:
        named = sorted({shard.layout for rank in buffered for shard in rank.shards})
        layouts = tuple([await self._layouts.digests(digest) for digest in named])
        message = Buffered(accepted.round, self._pod.state.worker, buffered, layouts)
        return await self._peers.call(accepted.coordinator, message, BufferedReply)
