"""Keep up with the plan of the coordinator, and keep it for the group of which this worker is the relay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from holdfast_core import logs
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Worker
from holdfast_core.messages.schema import Plan, Round
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import relay_of
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.relaying import PlanBoard, is_newer

_POLL_SECONDS = 20.0
"""Longest time for which a request waits for a newer plan."""
_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.5


class Follower:
    """Background task that requests each newer plan, and has it carried out."""

    def __init__(
        self,
        pod: Pod,
        peers: Peers,
        own_plan: Callable[[Worker, str, int, float], Awaitable[Plan]],
        take: Callable[[Plan], None],
    ) -> None:
        """Create the task; `start` begins.

        Args:
            pod, peers: The pod, and where it gets the plan from.
            own_plan: Where the coordinator's worker gets it from. See PlanBoard.newer.
            take: Carries a plan out. It is always a whole plan.
        """
        self._pod = pod
        self._peers = peers
        self._own_plan = own_plan
        self._take = take
        self._tasks = Tasks()
        self.board = PlanBoard(pod.state.round)
        """The plan of the present round, for the group of this worker."""

    def start(self) -> None:
        self._tasks.spawn(self._run(), "plan")

    async def close(self) -> None:
        self.board.close()
        await self._tasks.cancel()

    async def _run(self) -> None:
        backoff, changes = self._pod.backoff(), logs.Changed()
        while True:
            state = self._pod.state
            if state.round != self.board.plan.round:
                self.board.close()
                self.board = PlanBoard(state.round)
            if state.accepted is None:
                await self._pod.current.replaced()
                continue
            try:
                plan = await self._newer(state.accepted, state.worker)
            except HoldfastError as error:
                changes.warning("plan", str(error), round=state.round)
                await self._pod.clock.sleep(min(backoff.next_seconds(), 2.0))
                continue
            backoff.reset()
            changes.healthy("plan")
            if plan is not None and self._pod.state.accepted is not None:
                await self._carry_out(plan, state.accepted, state.worker)

    async def _newer(self, accepted: Round, worker: Worker) -> Plan | None:
        """Return a newer plan. None if there is none, or another ROUND has been accepted meanwhile."""
        known = self.board.plan
        if worker == accepted.coordinator:
            coming = self._own_plan(worker, known.coordinator, known.version, _POLL_SECONDS)
        else:
            coming = self._peers.plan(accepted.coordinator, accepted.round, known, _POLL_SECONDS)
        request = asyncio.ensure_future(coming)
        over = asyncio.ensure_future(self._coordination_over(accepted))
        try:
            await asyncio.wait((request, over), return_when=asyncio.FIRST_COMPLETED)
            # A coordinator that is sealed, too, answers. A request that is cancelled costs its connection.
            await asyncio.wait((request,), timeout=_ANSWER_SECONDS)
            if not request.done():
                return None
            plan = request.result()
        finally:
            request.cancel()
            over.cancel()
        is_new = is_newer(plan, known.coordinator, known.version)
        return plan if is_new and plan.round == self._pod.state.round else None

    async def _coordination_over(self, accepted: Round) -> None:
        """Wait until the round is over, or another worker coordinates it."""
        while (now := self._pod.state.accepted) is not None and (now.round, now.coordinator) == (
            accepted.round,
            accepted.coordinator,
        ):
            await self._pod.current.replaced()

    async def _carry_out(self, plan: Plan, accepted: Round, worker: Worker) -> None:
        """Pass a plan on, and carry it out. A relay is released when its group knows that it is."""
        board = self.board
        board.publish(plan)
        if not plan.released or worker == accepted.coordinator:
            self._take(plan)
            return
        self._take(replace(plan, released=False))
        group = tuple(_group(accepted, worker))
        until = self._pod.clock.monotonic() + self._pod.settings.release_seconds
        while not board.is_known_to(group) and self._pod.clock.monotonic() < until:
            if self._pod.state.round != plan.round:
                return
            await self._pod.clock.sleep(_LOOK_SECONDS)
        self._take(plan)


def _group(accepted: Round, worker: Worker) -> Iterable[Worker]:
    """Return the other workers of the group of which this worker is the relay."""
    if relay_of(accepted, worker) != worker:
        return ()
    end = min(worker + accepted.fan_in, accepted.workers)
    return (Worker(other) for other in range(worker + 1, end))
