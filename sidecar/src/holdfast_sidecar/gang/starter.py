"""Start and end the ranks of this pod through its launcher, and exchange the rendezvous address.

Two rules of a restart are kept here. No round runs twice in a pod. A SEAL is answered only after the
launcher has ended the old round's ranks, has disconnected, or has not replied within
`Settings.end_seconds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from holdfast_core import logs
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Rank, RestartRound
from holdfast_core.messages.schema import (
    Hello,
    LauncherPlan,
    LauncherState,
    Run,
    StoreAddress,
)
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import RoundState, relay_of
from holdfast_sidecar.gang.barrier import Facts, open_barrier
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.intake import LocalConnection, LocalConnections

_POLL_SECONDS = 20.0


class Starter:
    """State of the launcher and of the rendezvous in the current round, on the event loop."""

    def __init__(
        self,
        pod: Pod,
        gang: LocalGang,
        connections: LocalConnections,
        peers: Peers,
        restored: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._pod = pod
        self._gang = gang
        self._connections = connections
        self._peers = peers
        self._restored = restored
        self._on_change = on_change
        self._tasks = Tasks()
        self._watch = Tasks()
        self._store: StoreAddress | None = None
        self._store_known = asyncio.Event()
        self._last_round: RestartRound | None = None
        self._ended = asyncio.Event()
        self._run: Run | None = None
        """The barrier of this round is open."""
        self._released: RestartRound | None = None
        """The newest round in which a plan has released the pod."""
        self._waiting = logs.Changed()

    @property
    def has_launcher(self) -> bool:
        """Return whether the launcher is connected."""
        return self._connections.launcher is not None

    # ------------------------------------------------------------------ rounds

    def begin(self) -> None:
        """Begin a new round after its ROUND was accepted: host the TCPStore here, or ask for its address."""
        state = self._pod.current()
        if state.accepted is None:
            return
        self.push_plan()  # The launcher sends its state again, which a repeated SEAL has discarded.
        if state.accepted.store_host != state.worker:
            self._tasks.spawn(self._ask_for_store(state.round), "rendezvous")
        self.evaluate()

    async def reset(self) -> None:
        """Forget the rendezvous of the round that ended, because a newer round was sealed."""
        await self._tasks.cancel()
        self._store = self._run = None
        known, self._store_known = self._store_known, asyncio.Event()
        known.set()
        self._gang.barrier_open = False

    async def end_ranks(self, round_: RestartRound) -> bool:
        """Have the launcher end all ranks of rounds below `round_`.

        Returns:
            True once the launcher has confirmed it or disconnected, or if it runs no ranks. False if it
            did not reply within `Settings.end_seconds`.
        """
        running = self._gang.running_round
        if running is not None and running >= round_:
            # This sidecar has restarted and is sealed again for the round in which its ranks train, or end.
            return True
        self._ended.clear()
        sent = self._connections.push_launcher(LauncherPlan(round_))
        if not sent or running is None:
            # No ranks run. A launcher without ranks may be busy preloading for long, so its reply is not
            # waited for.
            return True
        try:
            async with asyncio.timeout(self._pod.settings.end_seconds):
                await self._ended.wait()
        except TimeoutError:
            logs.warning("the launcher did not end its ranks in time", round=round_)
            return False
        return True

    def evaluate(self) -> None:
        """Send Run to the launcher if the barrier is open and Run was not sent yet."""
        state = self._pod.current()
        if state.accepted is None or self._gang.running_round == state.round:
            return
        run = open_barrier(
            Facts(
                state,
                self._restored(),
                self._store,
                self.has_launcher,
                self._gang.running_round,
                self._last_round,
            )
        )
        if not isinstance(run, Run):
            self._waiting.info("barrier", run, round=state.round)
            return
        if self.push_plan(run):
            self._run = run
            logs.info("barrier open", round=state.round, step=run.restore_point.step)
            self._gang.running_round = state.round
            self._last_round = state.round
            self._gang.barrier_open = True
            self._on_change()

    # ------------------------------------------------------------------ the launcher

    def hello(self, hello: Hello) -> None:
        """Handle a launcher that has connected or reconnected.

        Call it after the reply to the launcher's Hello is queued, because the reply must precede pushes.
        """
        state = self._pod.current()
        self._gang.running_round = hello.round
        self._last_round = hello.last_round
        if hello.round is None and hello.last_round == state.round:
            self._run = None  # No round runs twice in a pod.
        self.push_plan()
        if hello.round == state.round:
            self._gang.barrier_open = True
        elif hello.round is None and hello.last_round == state.round:
            # Ranks that returned are lost as well: nothing else makes them run again.
            self._gang.lost(map(Rank, state.own_ranks), "trainer container restarted")
        self.evaluate()
        self._on_change()

    def gone(self, connection: LocalConnection) -> None:
        """Handle the end of the launcher's connection.

        If the launcher does not reconnect within `launcher_grace_seconds`, its ranks are reported dead.
        """
        self._ended.set()
        running = self._gang.running_round
        state = self._pod.current()
        if running is not None and running == state.round and state.accepted is not None:
            self._watch.spawn(self._lost_unless_back(running), "launcher gone")
        else:
            self._gang.running_round = None

    async def _lost_unless_back(self, running: RestartRound) -> None:
        await self._pod.clock.sleep(self._pod.settings.launcher_grace_seconds)
        if self._connections.launcher is not None or self._pod.current().round != running:
            return
        if self._gang.done:
            return
        self._gang.running_round = None
        ranks = map(Rank, self._pod.current().own_ranks)
        self._gang.launcher_lost(ranks, "the launcher ended together with the trainer container")
        self._on_change()

    def reported(self, message: LauncherState) -> None:
        """Handle the launcher's whole state."""
        state, running = self._pod.current(), self._gang.running_round
        if message.round == state.round:
            self._gang.reported(message, state.own_ranks)
        below = message.ended_below
        # The state may have been sent before the launcher received the Run of this round.
        if below is not None and below >= state.round and (running is None or running < below):
            self._gang.running_round = None
            self._ended.set()
        if message.store is not None and message.store.round == state.round:
            self._opened_store(state, message.store)
        self.evaluate()

    def release(self, round_: RestartRound) -> None:
        """Release the launcher. Call this each time that a plan of the round releases the pod."""
        if self._released != round_:
            self._released = round_
            self.push_plan()

    def push_plan(self, run: Run | None = None) -> bool:
        """Send the launcher all that it is to do in this round. Return False if it is not connected."""
        state = self._pod.current()
        hosts = state.accepted is not None and state.accepted.store_host == state.worker
        run = run or self._run
        if run is not None and run.round != state.round:
            run = None  # A seal is under way, and `reset` has not forgotten the old round yet.
        released = self._released == state.round
        plan = LauncherPlan(state.round, hosts, run, self._gang.stacks_wanted, released)
        return self._connections.push_launcher(plan)

    def _opened_store(self, state: RoundState, store: StoreAddress) -> None:
        """Record the TCPStore of this round that the launcher has opened in this pod."""
        member = state.member(state.worker)
        if member is None:
            return
        try:
            host = self._peers.endpoint(member).host
        except HoldfastError:
            host = self._pod.settings.contract.pod_ip
        self._set_store(replace(store, host=host))

    # ------------------------------------------------------------------ rendezvous

    def _set_store(self, store: StoreAddress) -> None:
        if self._store == store:
            return
        self._store = store
        self._store_known.set()
        self.evaluate()

    async def rendezvous(self, round_: RestartRound, timeout_seconds: float) -> StoreAddress:
        """Return the store's address to another member, on the worker that hosts the store or on a relay.

        Waits until the address is known. The port is 0 if the time runs out or the round ends.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._store_known.wait()
        except TimeoutError:
            pass
        return self._store or StoreAddress(round_, 0, "")

    async def _ask_for_store(self, round_: RestartRound) -> None:
        """Poll the own relay, or the worker that hosts the store, until it returns the address."""
        backoff = self._pod.backoff()
        own, is_relay_silent = self._pod.current().worker, False
        while True:
            accepted = self._pod.current().accepted
            if accepted is None:
                return
            relay = relay_of(accepted, own)
            asked = accepted.store_host if relay == own or is_relay_silent else relay
            try:
                answer = await self._peers.get(
                    asked,
                    "/v1/rendezvous",
                    StoreAddress,
                    query={"round": str(round_), "timeout": str(int(_POLL_SECONDS))},
                    seconds=_POLL_SECONDS + 5,
                )
            except HoldfastError as error:
                self._waiting.warning("rendezvous", str(error), round=round_)
                is_relay_silent = not is_relay_silent
                await self._pod.clock.sleep(min(backoff.next_seconds(), 1.0))
                continue
            backoff.reset()
            if answer.round == round_ and answer.port and answer.secret:
                self._set_store(answer)
                return
