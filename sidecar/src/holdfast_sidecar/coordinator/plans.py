"""The coordinator's plan, as it is published: to its own worker, and to all others.

Workers wait for the next plan (`GET /v1/plan`), and always get the whole one. So nothing has to be repeated,
and it makes no difference what a worker has received before.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from holdfast_core.clock import Clock
from holdfast_core.ids import Step, Worker
from holdfast_core.messages.schema import GangRequest, Plan, Round
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.rounds import next_hop
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.plan import plan
from holdfast_sidecar.wire.following import PlanBoard
from holdfast_sidecar.wire.verbs import STOP

_LOOK_SECONDS = 0.5


class Plans:
    """Publisher of the plan that follows from the ledger."""

    def __init__(self, settings: Settings, ledger: Ledger, clock: Clock, message: Round) -> None:
        """Create the publisher. The plan is published after the first `wake`."""
        self._settings = settings
        self._ledger = ledger
        self._clock = clock
        self._own = message.coordinator
        self._name = secrets.token_hex(8)
        self._boards = {True: PlanBoard(ledger.round), False: PlanBoard(ledger.round)}
        """The plan of the own worker, and that of the others."""
        self._asked: tuple[str, str] = "", ""
        """The newest tokens of requests to save, and to stop."""
        self._tokens = set[tuple[str, str]]()
        self._released = {True: False, False: False}
        self._tasks = Tasks()
        self._later: asyncio.Handle | None = None
        self._neighbours = frozenset(
            worker
            for worker in ledger.workers
            if worker != self._own and next_hop(message, worker) == self._own
        )

    async def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        await self._tasks.cancel()
        for board in self._boards.values():
            board.close()

    def wake(self) -> None:
        """Plan again soon. Call this when the ledger has changed."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._later = None
        for is_own, board in self._boards.items():
            wanted = plan(self._ledger, released=self._released[is_own], is_first=is_own)
            save, stop = self._asked
            wanted = replace(wanted, coordinator=self._name, save=save, stop=stop)
            if wanted != replace(board.plan, version=0):
                board.publish(replace(wanted, version=board.plan.version + 1))

    async def newer(
        self, worker: Worker, coordinator: str, since: int, timeout_seconds: float
    ) -> Plan:
        """See PlanBoard.newer."""
        board = self._boards[worker == self._own]
        return await board.newer(worker, coordinator, since, timeout_seconds)

    def request(self, path: str, message: GangRequest) -> bool:
        """Pass a request on to rank 0. Return False if the same one was made before in this round."""
        if (path, message.token) in self._tokens:
            return False
        self._tokens.add((path, message.token))
        save, stop = self._asked
        self._asked = (save, message.token) if path == STOP else (message.token, stop)
        self.wake()
        return True

    def prune(self, steps: tuple[Step, ...]) -> None:
        """Forget these steps and have workers delete them, except for those on their way to the store."""
        self._ledger.forget(steps)
        self.wake()

    def release(self) -> None:
        """Let all pods end, the own one last: when the others know it, or after `release_seconds`."""
        if not self._released[False]:
            self._released[False] = True
            self._publish()
            self._tasks.spawn(self._release_own(), "release")

    async def _release_own(self) -> None:
        until = self._clock.monotonic() + self._settings.release_seconds
        others = self._boards[False]
        while not others.is_known_to(self._neighbours) and self._clock.monotonic() < until:
            await self._clock.sleep(_LOOK_SECONDS)
        self._released[True] = True
        self._publish()
