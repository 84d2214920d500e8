"""`holdfast run` in a worker pod: runs the rounds that the sidecar requests.

 1. The launcher connects and sends Hello, with the round whose ranks run and the last round that it forked.
 2. On HostStore it starts the round's store process and sends StoreAddress.
 3. On Run it records the round durably and forks the round's ranks. It never runs a round twice.
 4. When a rank ends, it sends Exited. When all ranks have returned 0, it sends Finish and exits as soon as
    the sidecar releases it.
 5. On TakeStacks it finds out where its ranks are, writes their stacks to its log and sends Stacks.
 6. On End it sends SIGKILL to all ranks, reaps them and sends Ended. Then it waits for the next Run.

The launcher of a spare pod connects when the fork server has imported torch. So the sidecar knows that the
spare is ready (ADR 0015).

This also works when the sidecar starts late, restarts, or repeats a message.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Any

from holdfast.launcher.channel import SidecarChannel
from holdfast.launcher.memory import ContainerMemory
from holdfast.launcher.ranks.gang import STORE_SECRET_BYTES, Gang, RoundSettings
from holdfast.launcher.ranks.processes import Processes, RankProcess
from holdfast.launcher.record import RoundRecord
from holdfast_core.contract import PodContract
from holdfast_core.ids import Rank, RestartRound, is_spare
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    End,
    Ended,
    Exited,
    Finish,
    FinishReply,
    Hello,
    HelloReply,
    HostStore,
    LocalRole,
    Run,
    Stacks,
    StoreAddress,
    TakeStacks,
)

logger = logging.getLogger(__name__)

_FINISH_PAUSE_SECONDS = 0.2
_REPORT_SECONDS = 5.0
"""Limit for the reports of ended ranks when the launcher leaves. They need some turns of its event loop."""


@dataclass(frozen=True, slots=True)
class _Store:
    """The store process of a round, which this pod hosts."""

    key: str
    address: StoreAddress


class PodLauncher:
    """Launcher of one pod's ranks. `run` returns when the gang has finished."""

    def __init__(
        self,
        processes: Processes,
        contract: PodContract,
        record: RoundRecord,
        memory: ContainerMemory,
    ) -> None:
        self._processes = processes
        self._memory = memory
        self._contract = contract
        self._record = record
        self._last_round: RestartRound | None = None
        self._gang: Gang | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stacks: asyncio.Task[None] | None = None
        self._stacks_token = ""
        self._exited: dict[Rank, Exited] = {}
        self._ended_round: RestartRound | None = None
        self._store: _Store | None = None
        self._succeeded = asyncio.Event()
        self._stopping = False
        self.channel: SidecarChannel | None = None

    async def run(self, channel: SidecarChannel) -> int:
        """Serve the sidecar until the gang has finished, then return 0.

        Raises FormatError for an invalid round record, and for a spare what `Processes.ready` raises.
        """
        self._last_round = self._record.read()
        if is_spare(self._contract.worker):
            await self._processes.ready()
        self.channel = channel
        connection = asyncio.ensure_future(channel.run())
        try:
            finishing = asyncio.ensure_future(self._finish())
            await asyncio.wait({connection, finishing}, return_when=asyncio.FIRST_COMPLETED)
            if connection.done():
                finishing.cancel()
                connection.result()
            return finishing.result()
        finally:
            if self._stopping and self._watch is not None:
                # All ranks have ended. Without this wait the sidecar would miss those that ended last.
                await asyncio.wait({self._watch}, timeout=_REPORT_SECONDS)
            connection.cancel()
            self._cancel_tasks()

    def stop(self) -> None:
        """Fork no more ranks and send no Finish, because the pod is about to end."""
        self._stopping = True

    # ------------------------------------------------------------------ ChannelHandler

    def hello(self) -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            self._contract.job_uid,
            LocalRole.LAUNCHER,
            round=None if self._gang is None else self._gang.plan.round,
            last_round=self._last_round,
        )

    async def connected(self, reply: HelloReply) -> None:
        """Send again the messages that the sidecar may not have received."""
        logger.info("connected to the sidecar, which is in round %d", reply.round)
        if self._ended_round is not None and self._gang is None:
            self._notify(Ended(self._ended_round))
        if self._store is not None:
            self._notify(self._store.address)
        for message in self._exited.values():
            self._notify(message)

    async def push(self, message: Any) -> None:
        match message:
            case HostStore():
                await self._host_store(message.round)
            case Run():
                await self._start(message)
            case TakeStacks():
                self._take_stacks(message)
            case End():
                await self._end(message.round)
            case _:
                logger.warning("ignored a message that is not for launchers: %s", message)

    # ------------------------------------------------------------------ steps

    async def _host_store(self, round_: RestartRound) -> None:
        if self._store is not None and self._store.address.round != round_:
            self._processes.end_store(self._store.key)
            self._store = None
        if self._store is None:
            key, port = await self._processes.fork_store("")
            secret = secrets.token_hex(STORE_SECRET_BYTES)
            self._store = _Store(key, StoreAddress(round_, port, secret))
        self._notify(self._store.address)

    async def _start(self, run: Run) -> None:
        if self._stopping:
            return
        if self._last_round is not None and run.round <= self._last_round:
            logger.warning(
                "ignored Run for round %d: the ranks of round %d were forked already, and a round "
                "is never forked twice",
                run.round,
                self._last_round,
            )
            return
        if self._gang is not None:
            await self._stop_gang()
        await asyncio.to_thread(self._record.write, run.round)
        self._last_round = run.round
        self._exited.clear()
        self._ended_round = None
        self._gang = Gang(self._processes, _plan(run, self._contract))
        logger.info(
            "round %d: forking ranks %d to %d of %d, from step %s",
            run.round,
            run.first_rank,
            run.first_rank + run.procs_per_worker - 1,
            run.world_size,
            run.restore_point.step,
        )
        self._memory.begin()
        await self._gang.start()
        self._watch = asyncio.ensure_future(self._watch_ranks(self._gang))

    async def _end(self, round_: RestartRound) -> None:
        if self._gang is not None and self._gang.plan.round < round_:
            logger.info("round %d begins: ending the ranks", round_)
            await self._stop_gang()
        if self._store is not None and self._store.address.round < round_:
            self._processes.end_store(self._store.key)
            self._store = None
        if self._gang is None:
            self._exited.clear()
            self._ended_round = round_
            self._notify(Ended(round_))

    def _take_stacks(self, message: TakeStacks) -> None:
        """Find the stacks of the ranks in a task, because End must not wait for them."""
        gang = self._gang
        if gang is None or gang.plan.round != message.round:
            return
        if self._stacks is not None and not self._stacks.done():
            if self._stacks_token == message.token:
                return  # the sidecar repeats the request until it has the stacks
            self._stacks.cancel()
        self._stacks_token = message.token
        self._stacks = asyncio.ensure_future(self._send_stacks(gang, message))

    async def _send_stacks(self, gang: Gang, message: TakeStacks) -> None:
        found = await gang.find_stacks()
        for one in found:
            logger.warning(
                "no rank of the gang has finished a step for long; rank %d: %s",
                one.stack.rank,
                one.log,
            )
        self._notify(Stacks(message.round, message.token, tuple(one.stack for one in found)))

    def _cancel_tasks(self) -> None:
        for task in (self._watch, self._stacks):
            if task is not None:
                task.cancel()
        self._watch = self._stacks = None

    async def _stop_gang(self) -> None:
        self._cancel_tasks()
        self._succeeded.clear()
        if self._gang is not None:
            await self._gang.end()
            self._gang = None

    async def _watch_ranks(self, gang: Gang) -> None:
        seen: set[Rank] = set()
        while (process := await gang.next_end(seen)) is not None:
            seen.add(process.rank)
            code = 1 if process.code is None else process.code
            self._exited[process.rank] = self._end_of(process, code, gang.plan.round)
            if code != 0:
                logger.error(
                    "rank %d ended with code %s in round %d; waiting for the next round",
                    process.rank,
                    code,
                    gang.plan.round,
                )
            self._notify(self._exited[process.rank])
        if all(message.code == 0 for message in self._exited.values()):
            self._succeeded.set()

    def _end_of(self, process: RankProcess, code: int, round_: RestartRound) -> Exited:
        if code == 0:
            return Exited(round_, process.rank, code)
        memory = self._memory.exceeded()
        return Exited(round_, process.rank, code, process.last_output(), memory)

    async def _finish(self) -> int:
        """After all ranks have succeeded, send Finish until the sidecar releases the launcher. Return 0."""
        while True:
            await self._succeeded.wait()
            if self.channel is not None and self._last_round is not None and not self._stopping:
                try:
                    reply = await self.channel.request(Finish(self._last_round))
                except ConnectionResetError:
                    reply = None
                if isinstance(reply, FinishReply) and reply.released and self._succeeded.is_set():
                    return 0
            await asyncio.sleep(_FINISH_PAUSE_SECONDS)

    def _notify(self, message: Any) -> None:
        if self.channel is not None:
            self.channel.notify(message)


def _plan(run: Run, contract: PodContract) -> RoundSettings:
    return RoundSettings(
        round=run.round,
        world_size=run.world_size,
        first_rank=run.first_rank,
        procs=run.procs_per_worker,
        group_rank=run.group_rank,
        master_address=run.master_address,
        master_port=run.master_port,
        run_id=contract.job_uid,
        interval_steps=run.policy.interval_steps,
        timing=run.policy.timing,
        restore_step=run.restore_point.step,
        restore_known=True,
        store_secret=run.store_secret,
    )
