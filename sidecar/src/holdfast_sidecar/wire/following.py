"""The plan of the coordinator on its way to the workers, which wait for the next one (`GET /v1/plan`).

The coordinator publishes it (`Plans`) each time what follows from its ledger has changed. Each worker keeps
up with it. A relay also keeps it for its group (ADR 0016). Nothing is acknowledged: a worker always gets the
whole plan, so it makes no difference what it has received before.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import GangRequest, Plan, Round
from holdfast_core.tasks import Signal, Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import next_hop, relay_of
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.verbs import SAVE_NOW, STOP

_POLL_SECONDS = 20.0
"""Longest time for which a request waits for a newer plan."""
_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_KNOWN_TOKENS = 64
"""Newest requests of each kind that count only once. The operator has at most 16 open."""


class PlanBoard:
    """The newest plan of a round, for which workers wait."""

    def __init__(self, round_: RestartRound) -> None:
        self.plan = Plan(round_)
        self._changed = asyncio.Event()
        self._known: dict[Worker, tuple[str, int]] = {}
        """The plan that each worker has named as its last one."""
        self._closed = False

    def publish(self, plan: Plan) -> None:
        """Replace the plan, unless the same process has made a newer one."""
        if is_newer(plan, self.plan.coordinator, self.plan.version):
            self.plan = plan
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def newer(
        self, worker: Worker, coordinator: str, since: int, timeout_seconds: float
    ) -> Plan:
        """Return the plan when it is newer than the one that a worker has, or after the time-out.

        Args:
            worker: The worker, which has received and passed on that one.
            coordinator: `Plan.coordinator` of that one.
            since: `Plan.version` of that one.
            timeout_seconds: The time-out.
        """
        self._known[worker] = coordinator, since
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self._closed and not is_newer(self.plan, coordinator, since):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.plan

    def is_known_to(self, workers: Iterable[Worker]) -> bool:
        """Return whether all these workers have the present plan."""
        present = self.plan.coordinator, self.plan.version
        return all(self._known.get(worker) == present for worker in workers)

    def close(self) -> None:
        """End all waits."""
        self._closed = True
        self._changed.set()


def is_newer(plan: Plan, coordinator: str, version: int) -> bool:
    """Return whether a plan is newer than one of this process and version. One of another process is."""
    if plan.coordinator in ("", coordinator):
        return plan.coordinator != "" and plan.version > version
    return True


class Plans:
    """Publisher of the coordinator's plan: to its own worker, and to all others."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        message: Round,
        current: Callable[[bool, bool], Plan],
    ) -> None:
        """Create the publisher. The plan is published after the first `wake`.

        Args:
            settings, clock: Of the pod.
            message: The ROUND.
            current: Returns the present plan for the own worker (True) or the others, released or not.
        """
        self._settings = settings
        self._clock = clock
        self._current = current
        self._own = message.coordinator
        self._name = secrets.token_hex(8)
        self._boards = {True: PlanBoard(message.round), False: PlanBoard(message.round)}
        """The plan of the own worker, and that of the others."""
        self._save_from: Step | None = None
        self._stop = False
        self._tokens: dict[str, deque[str]] = {
            path: deque(maxlen=_KNOWN_TOKENS) for path in (SAVE_NOW, STOP)
        }
        self._released = {True: False, False: False}
        self._tasks = Tasks()
        self._later: asyncio.Handle | None = None
        self._neighbours = frozenset(
            worker
            for worker in map(Worker, range(message.workers))
            if worker != self._own and next_hop(message, worker) == self._own
        )

    async def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        await self._tasks.cancel()
        for board in self._boards.values():
            board.close()

    def wake(self) -> None:
        """Plan again soon. Call this when the plan may have changed."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._later = None
        for is_own, board in self._boards.items():
            wanted = self._current(is_own, self._released[is_own])
            wanted = replace(
                wanted, coordinator=self._name, save_from=self._save_from, stop=self._stop
            )
            if wanted != replace(board.plan, version=0):
                board.publish(replace(wanted, version=board.plan.version + 1))

    async def newer(
        self, worker: Worker, coordinator: str, since: int, timeout_seconds: float
    ) -> Plan:
        """See PlanBoard.newer."""
        board = self._boards[worker == self._own]
        return await board.newer(worker, coordinator, since, timeout_seconds)

    def request(self, path: str, message: GangRequest, after: Step) -> bool:
        """Pass a request on to rank 0. Return False if the same one was made before in this round.

        Requests between two plans become one. A save of a step above the newest `after` fulfils all of them.
        """
        if message.token in self._tokens[path]:
            return False
        self._tokens[path].append(message.token)
        if path == STOP:
            self._stop = True
        else:
            self._save_from = max(self._save_from or Step(0), Step(after + 1))
        self.wake()
        return True

    @property
    def save_tokens(self) -> tuple[str, ...]:
        """The tokens of the newest requests to save."""
        return tuple(self._tokens[SAVE_NOW])

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


class Follower:
    """Background task that requests each newer plan, and has it carried out."""

    def __init__(
        self,
        pod: Pod,
        peers: Peers,
        own_plan: Callable[[Worker, str, int, float], Awaitable[Plan]],
        taken: Signal[[Plan]],
    ) -> None:
        """Create the task; `start` begins.

        Args:
            pod, peers: The pod, and where it gets the plan from.
            own_plan: Where the coordinator's worker gets it from. See PlanBoard.newer.
            taken: Called with each plan that is to be carried out. It is always a whole plan.
        """
        self._pod = pod
        self._peers = peers
        self._own_plan = own_plan
        self._taken = taken
        self._tasks = Tasks()
        self._of = pod.state.round, pod.state.coordinator
        """The coordination of `_board`."""
        self._board = PlanBoard(pod.state.round)

    @property
    def board(self) -> PlanBoard:
        """The plan of the present coordination, for the group of this worker.

        The first call in another coordination replaces it. A plan of the last round would answer each request
        of the group at once, and the worker would repeat it without a pause. No board has both a plan that a
        coordinator has made for itself and one for others: their versions are counted apart.
        """
        state = self._pod.state
        if self._of != (state.round, state.coordinator):
            self._board.close()
            self._of, self._board = (state.round, state.coordinator), PlanBoard(state.round)
        return self._board

    def start(self) -> None:
        self._tasks.spawn(self._run(), "plan")

    async def close(self) -> None:
        self.board.close()
        await self._tasks.cancel()

    async def _run(self) -> None:
        backoff, changes = self._pod.backoff(), logs.Changed()
        while True:
            state, board = self._pod.state, self.board
            if state.accepted is None:
                await self._pod.current.replaced()
                continue
            try:
                plan = await self._newer(state.accepted, state.worker, board)
            except HoldfastError as error:
                changes.warning("plan", str(error), round=state.round)
                await self._pod.clock.sleep(min(backoff.next_seconds(), 2.0))
                continue
            backoff.reset()
            changes.healthy("plan")
            if plan is not None:
                await self._carry_out(plan, state.accepted, state.worker)

    async def _newer(self, accepted: Round, worker: Worker, board: PlanBoard) -> Plan | None:
        """Return a newer plan than that of the board. None if there is none, or if its coordination is over.

        A relay may answer a request that it still holds with the plan of the next coordinator.
        """
        known = board.plan
        if worker == accepted.coordinator:
            coming = self._own_plan(worker, known.coordinator, known.version, _POLL_SECONDS)
        else:
            coming = self._peers.plan(accepted.coordinator, accepted.round, known, _POLL_SECONDS)
        request = asyncio.ensure_future(coming)
        over = asyncio.ensure_future(self._over(board))
        try:
            await asyncio.wait((request, over), return_when=asyncio.FIRST_COMPLETED)
            # A coordinator that is sealed, too, answers. A request that is cancelled costs its connection.
            await asyncio.wait((request,), timeout=_ANSWER_SECONDS)
            if self.board is not board or not request.done():
                return None
            plan = request.result()
        finally:
            request.cancel()
            over.cancel()
        is_new = is_newer(plan, known.coordinator, known.version)
        return plan if is_new and plan.round == accepted.round else None

    async def _over(self, board: PlanBoard) -> None:
        """Wait until the coordination of the board is over."""
        while self.board is board:
            await self._pod.current.replaced()

    async def _carry_out(self, plan: Plan, accepted: Round, worker: Worker) -> None:
        """Pass a plan on, and carry it out. A relay is released when its group knows that it is."""
        self.board.publish(plan)
        if not plan.released or worker == accepted.coordinator:
            self._taken(plan)
            return
        self._taken(replace(plan, released=False))
        group = tuple(_group(accepted, worker))
        until = self._pod.clock.monotonic() + self._pod.settings.release_seconds
        while not self.board.is_known_to(group) and self._pod.clock.monotonic() < until:
            await self._pod.clock.sleep(_LOOK_SECONDS)
            if self._pod.state.round != plan.round:
                return
        self._taken(plan)


def _group(accepted: Round, worker: Worker) -> Iterable[Worker]:
    """Return the other workers of the group of which this worker is the relay."""
    if relay_of(accepted, worker) != worker:
        return ()
    end = min(worker + accepted.fan_in, accepted.workers)
    return (Worker(other) for other in range(worker + 1, end))
