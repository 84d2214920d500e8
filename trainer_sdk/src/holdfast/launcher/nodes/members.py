"""Node 0's view of the other nodes of a run: who has joined, and how their ranks end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.launcher.command_line.node_options import NodeOptions
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
from holdfast_core.errors import ConfigError, HoldfastError, UnavailableError
from holdfast_core.ids import Rank, RestartRound

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_MOST_STRANGERS = 64
"""Connections that may be open at once before they are authenticated. More are closed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a round ended."""

    what: str
    code: int
    """Exit code of the run if no restarts are left."""

    @classmethod
    def of_rank(cls, rank: Rank, code: int | None) -> Failure:
        """Return the failure of a rank. The run's exit code is 128 + N for signal N, as in a shell."""
        exit_code = 1 if code is None else 128 - code if code < 0 else code
        return cls(f"rank {rank} ended with code {code}", exit_code)


@dataclass(slots=True)
class _Member:
    """A node that has joined."""

    join: Join
    link: NodeLink
    exited: dict[Rank, int] = field(default_factory=dict)
    """Exit codes of its ranks in this round."""
    ended_round: RestartRound | None = None
    is_lost: bool = False

    @property
    def name(self) -> str:
        return f"node {self.join.node_rank} ({self.join.host})"


class Members:
    """The other nodes of a run. A run on a single node has none.

    Args:
        options: The nodes of the run, as node 0 sees them.
        ranks: Ranks of each node.
        on_stop: Called when a node has received a signal to stop.
    """

    def __init__(self, options: NodeOptions, ranks: int, on_stop: Callable[[], None]) -> None:
        self._options = options
        self._ranks = ranks
        self._on_stop = on_stop
        self._key = run_key(options)
        self._server: asyncio.Server | None = None
        self._joined: dict[int, _Member] = {}
        self._in_round: tuple[_Member, ...] = ()
        self._changed = asyncio.Event()
        self._strangers = 0
        self._is_stopping = False
        self._newest_round: RestartRound | None = None

    @property
    def next_round(self) -> RestartRound:
        """A round above all rounds whose ranks a node has forked.

        A new launcher of node 0 continues to count where the one before it stopped.
        """
        return RestartRound(0 if self._newest_round is None else self._newest_round + 1)

    async def open(self) -> None:
        """Listen for the other nodes. Raises ConfigError if the port is in use."""
        if self._options.count == 1:
            return
        try:
            self._server = await asyncio.start_server(self._accept, None, self._options.port)
        except OSError as error:
            raise ConfigError(
                f"holdfast run: node 0 cannot listen on port {self._options.port} (--rdzv-endpoint): "
                f"{error}; end the process that uses it, or pass another port on all nodes"
            ) from error

    async def gather(self) -> None:
        """Wait until all nodes have joined.

        Raises UnavailableError if they have not within the time that the options give.
        """
        if self._missing():
            logger.info("waiting for %s at %s", self._missing_nodes(), self._options.endpoint)
        try:
            async with asyncio.timeout(self._options.join_seconds):
                while self._missing():
                    await self._next_change()
        except TimeoutError as error:
            raise UnavailableError(
                f"{self._missing_nodes()} of {self._options.count} nodes did not join at "
                f"{self._options.endpoint} within {self._options.join_seconds:g} s (--rdzv-conf "
                "join_timeout): check that `holdfast run` was started there with the same --rdzv-id, and "
                "that it can reach this port"
            ) from error

    def start(self, message: StartRound) -> None:
        """Begin a round on all nodes."""
        self._in_round = tuple(self._joined.values())
        self._newest_round = message.round
        for member in self._in_round:
            member.exited.clear()
            member.link.send(message)

    async def failure(self) -> Failure | None:
        """Wait until a node or one of its ranks fails. Return None when all ranks returned 0."""
        if len(self._in_round) < self._options.count - 1:
            # The store of the round was started after all nodes had joined.
            return Failure("the connection to a node ended before the ranks were forked", 1)
        while True:
            for member in self._in_round:
                if member.is_lost and not self._is_stopping:
                    return Failure(f"the connection to {member.name} ended", 1)
                for rank, code in member.exited.items():
                    if code != 0:
                        return Failure.of_rank(rank, code)
            if all(self._has_succeeded(member) for member in self._in_round):
                return None
            await self._next_change()

    async def end(self, round_: RestartRound) -> None:
        """Kill the ranks of a round on all nodes, and wait until they have ended.

        The ranks of a node that is lost are not waited for: its launcher kills them, and they know neither
        address nor secret of the next round's store.
        """
        for member in self._in_round:
            member.link.send(EndRound(round_))
        while any(not m.is_lost and m.ended_round != round_ for m in self._in_round):
            await self._next_change()
        self._in_round = ()

    def stop(self) -> None:
        """Make the ranks of all nodes save and stop."""
        self._is_stopping = True
        for member in self._joined.values():
            member.link.send(Stop())

    async def leave(self, code: int, reason: str) -> None:
        """Make the launchers of all nodes exit with `code`, and stop to listen."""
        if self._server is not None:
            self._server.close()
        for member in self._joined.values():
            member.link.send(Leave(code, reason))
        # A connection that is closed while messages arrive is reset, which may destroy Leave. The nodes
        # therefore close their ends first.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                while self._joined:
                    await self._next_change()
        for member in self._joined.values():
            member.link.close()

    # ------------------------------------------------------------------ connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")
        if self._strangers >= _MOST_STRANGERS:
            writer.close()
            return
        self._strangers += 1
        member = None
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                member = await self._admit(reader, writer)
        except (HoldfastError, OSError, TimeoutError) as error:
            logger.warning("refused a connection from %s: %s", address, error or "it sent nothing")
        finally:
            self._strangers -= 1
            if member is None:
                writer.close()
        if member is not None:
            await self._serve(member)

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Member | None:
        link = await NodeLink.open(reader, writer, self._key, leads=True)
        join = await link.receive()
        if not isinstance(join, Join):
            raise UnavailableError(f"it sent {type(join).__name__} before Join")
        refusal = self._refusal(join)
        if refusal is not None:
            logger.warning("refused node %d (%s): %s", join.node_rank, join.host, refusal.reason)
            link.send(refusal)
            await link.wait_closed(_LEAVE_SECONDS)
            return None
        member = _Member(join, link)
        self._joined[join.node_rank] = member
        rounds = [r for r in (self._newest_round, join.last_round) if r is not None]
        self._newest_round = max(rounds, default=None)
        link.send(Joined())
        link.keep_alive()
        logger.info("%s has joined", member.name)
        self._changed.set()
        return member

    def _refusal(self, join: Join) -> Refused | None:
        own = self._options
        if join.nodes != own.count:
            return Refused(f"it has --nnodes {join.nodes}, node 0 has {own.count}", may_retry=False)
        if join.ranks != self._ranks:
            return Refused(
                f"it starts {join.ranks} ranks, node 0 starts {self._ranks}: pass the same "
                "--nproc-per-node on all nodes",
                may_retry=False,
            )
        if not 0 < join.node_rank < own.count:
            return Refused(
                f"its --node-rank is {join.node_rank}, expected 1 to {own.count - 1}",
                may_retry=False,
            )
        other = self._joined.get(join.node_rank)
        if other is not None:
            # A launcher on a machine that crashed leaves a connection that only its silence ends.
            return Refused(f"{other.name} has joined with this --node-rank", may_retry=True)
        return None

    async def _serve(self, member: _Member) -> None:
        reason = "the launcher of node 0 has ended"
        try:
            while True:
                self._handle(member, await member.link.receive())
                self._changed.set()
        except HoldfastError as error:
            reason = str(error)
        finally:
            member.is_lost = True
            member.link.close()
            if self._joined.get(member.join.node_rank) is member:
                del self._joined[member.join.node_rank]
            self._changed.set()
            logger.info("the connection to %s ended: %s", member.name, reason)

    def _handle(self, member: _Member, message: Any) -> None:
        match message:
            case RankExited(round_, rank, code):
                if round_ == self._newest_round:
                    member.exited[rank] = code
            case RoundEnded(round_):
                member.ended_round = round_
            case Stop():
                logger.info("%s was asked to stop", member.name)
                self._on_stop()
            case _:
                raise UnavailableError(f"it sent {type(message).__name__}, which only node 0 sends")

    # ------------------------------------------------------------------ waiting

    def _has_succeeded(self, member: _Member) -> bool:
        return member.is_lost or len(member.exited) == self._ranks

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._options.count) if rank not in self._joined]

    def _missing_nodes(self) -> str:
        missing = self._missing()
        shown = ", ".join(str(rank) for rank in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return f"{'node' if len(missing) == 1 else 'nodes'} {shown}{more}"

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


async def first_failure(*waits: Any) -> Failure | None:
    """Return the first failure of several waits, or None when all of them ended without one."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        for done in asyncio.as_completed(tasks):
            failure: Failure | None = await done
            if failure is not None:
                return failure
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
