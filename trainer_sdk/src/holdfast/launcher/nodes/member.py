"""The launcher of a node other than node 0: joins node 0, and runs the rounds that it starts."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from holdfast.launcher.nodes.leader import GangOptions
from holdfast.launcher.nodes.link import NodeLink, run_key
from holdfast.launcher.nodes.messages import (
    EndRound,
    Join,
    Joined,
    Leave,
    RankExited,
    Refused,
    RoundEnded,
    StartRound,
    Stop,
)
from holdfast.launcher.ranks.gang import Gang
from holdfast.launcher.ranks.processes import Processes
from holdfast_core.errors import ConfigError, FormatError, UnavailableError
from holdfast_core.ids import Rank, RestartRound

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5


class NodeMember:
    """Launcher of the ranks of one node. `run` returns when node 0 has ended the run.

    Args:
        processes: Processes of this launcher.
        options: The gang, as this node sees it.
        on_stop: Called when another node has received a signal to stop.
    """

    def __init__(
        self, processes: Processes, options: GangOptions, on_stop: Callable[[], None]
    ) -> None:
        self._processes = processes
        self._options = options
        self._on_stop = on_stop
        self._key = run_key(options.nodes)
        self._last_round: RestartRound | None = None
        self._link: NodeLink | None = None
        self._gang: Gang | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False

    def stop(self) -> None:
        """Fork no more ranks, and stop the ranks of all nodes."""
        self._is_stopping = True
        if self._link is not None:
            self._link.send(Stop())

    async def run(self) -> int:
        """Return the exit code that node 0 has sent.

        Raises UnavailableError if node 0 cannot be joined in time, and ConfigError if it refuses this node.
        """
        await self._processes.ready()
        try:
            while True:
                self._link = await self._join()
                try:
                    leave = await self._serve(self._link)
                    logger.info("the run has ended: %s", leave.reason)
                    return leave.code
                except (FormatError, UnavailableError) as error:
                    reason = str(error)
                finally:
                    self._link.close()
                    self._link = None
                if self._is_stopping:
                    # The ranks still save. The launcher exits when they have ended.
                    await asyncio.get_running_loop().create_future()
                # Node 0 may have started a round without this node, or may have been lost with its store.
                await self._end_ranks()
                logger.warning(
                    "the connection to node 0 ended: %s; ended the ranks of this node, and joining again",
                    reason,
                )
        finally:
            self._forget_watch()

    # ------------------------------------------------------------------ joining

    async def _join(self) -> NodeLink:
        """Connect to node 0 until it accepts this node."""
        nodes = self._options.nodes
        deadline = time.monotonic() + nodes.join_seconds
        logged = ""
        while True:
            try:
                return await self._try_join()
            except (OSError, TimeoutError, FormatError, UnavailableError) as error:
                reason = str(error) or "it does not answer"
            if reason != logged:
                logger.info("waiting for node 0 at %s: %s", nodes.endpoint, reason)
                logged = reason
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"node {nodes.rank} could not join node 0 at {nodes.endpoint} within "
                    f"{nodes.join_seconds:g} s (--rdzv-conf join_timeout): {reason}; check that "
                    "`holdfast run --node-rank 0` runs there with the same --rdzv-id"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _try_join(self) -> NodeLink:
        nodes = self._options.nodes
        link = None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(nodes.host, nodes.port)
                try:
                    link = await NodeLink.open(reader, writer, self._key, leads=False)
                except BaseException:
                    writer.close()
                    raise
                link.send(
                    Join(
                        nodes.rank,
                        nodes.count,
                        self._options.procs,
                        socket.gethostname(),
                        self._last_round,
                    )
                )
                try:
                    reply = await link.receive()
                except UnavailableError as error:
                    raise UnavailableError(
                        f"{error} instead of an answer: its --rdzv-id or HOLDFAST_RUN_TOKEN may differ, "
                        "which its log then says"
                    ) from error
            if isinstance(reply, Refused) and not reply.may_retry:
                raise ConfigError(f"holdfast run: node 0 refused node {nodes.rank}: {reply.reason}")
            if not isinstance(reply, Joined):
                raise UnavailableError(
                    reply.reason if isinstance(reply, Refused) else f"it sent {reply}"
                )
            logger.info("node %d of %d has joined %s", nodes.rank, nodes.count, nodes.endpoint)
            link.keep_alive()
            return link
        except BaseException:
            if link is not None:
                link.close()
            raise

    # ------------------------------------------------------------------ rounds

    async def _serve(self, link: NodeLink) -> Leave:
        """Do what node 0 asks for, until it ends the run."""
        # The ranks of a large state take seconds to end, and the connection must be read meanwhile.
        commands: asyncio.Queue[StartRound | EndRound] = asyncio.Queue()
        reading = asyncio.ensure_future(self._read(link, commands))
        working = asyncio.ensure_future(self._work(link, commands))
        try:
            await asyncio.wait({reading, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return await reading
        finally:
            for task in (reading, working):
                task.cancel()
            await asyncio.gather(reading, working, return_exceptions=True)

    async def _read(self, link: NodeLink, commands: asyncio.Queue[StartRound | EndRound]) -> Leave:
        while True:
            message: Any = await link.receive()
            match message:
                case StartRound() | EndRound():
                    commands.put_nowait(message)
                case Stop():
                    logger.info("another node was asked to stop")
                    self._on_stop()
                case Leave():
                    return message
                case _:
                    raise FormatError(f"it sent {type(message).__name__}, which it never does")

    async def _work(self, link: NodeLink, commands: asyncio.Queue[StartRound | EndRound]) -> None:
        while True:
            command = await commands.get()
            match command:
                case StartRound():
                    await self._start(link, command)
                case EndRound(round_):
                    await self._end_ranks()
                    link.send(RoundEnded(round_))

    async def _start(self, link: NodeLink, start: StartRound) -> None:
        if self._is_stopping:
            return
        if self._last_round is not None and start.round <= self._last_round:
            raise FormatError(
                f"it started round {start.round} after round {self._last_round}: a round never runs twice"
            )
        await self._end_ranks()
        self._last_round = start.round
        nodes = self._options.nodes
        plan = self._options.plan(start, self._key)
        logger.info(
            "round %d: forking ranks %d to %d of %d",
            start.round,
            plan.first_rank,
            plan.first_rank + plan.procs - 1,
            nodes.count * plan.procs,
        )
        self._gang = Gang(self._processes, plan)
        await self._gang.start()
        self._watch = asyncio.ensure_future(self._watch_ranks(link, self._gang))

    async def _watch_ranks(self, link: NodeLink, gang: Gang) -> None:
        seen: set[Rank] = set()
        while (process := await gang.next_end(seen)) is not None:
            seen.add(process.rank)
            code = 1 if process.code is None else process.code
            if code != 0:
                logger.error(
                    "rank %d ended with code %d in round %d", process.rank, code, gang.plan.round
                )
            link.send(RankExited(gang.plan.round, process.rank, code))

    async def _end_ranks(self) -> None:
        self._forget_watch()
        if self._gang is not None:
            await self._gang.end()
            self._gang = None

    def _forget_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
