"""Runs the rounds of a gang without a sidecar, on one node or on several, and restarts all ranks in place.

It behaves like torchrun. Every round has its own store process on this node, which is node 0, and the ranks
of a node are forked from the same fork server. `Checkpointer(dir=...)` decides from which step a round
starts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

from holdfast.launcher.command_line.node_options import NodeOptions
from holdfast.launcher.nodes.link import run_key, store_secret
from holdfast.launcher.nodes.members import Failure, Members, first_failure
from holdfast.launcher.nodes.messages import StartRound
from holdfast.launcher.ranks.gang import Gang, RoundPlan
from holdfast.launcher.ranks.processes import Processes
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Rank, RestartRound

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EXIT_STOPPED = 143
"""Exit code after SIGTERM, also of the launchers that did not receive it themselves."""
_SALT_BYTES = 32


@dataclass(frozen=True, slots=True)
class GangOptions:
    """What the launchers of all nodes of a gang agree on, and the scratch directory of this one."""

    procs: int
    """Ranks of each node."""
    max_restarts: int
    nodes: NodeOptions
    scratch_dir: str | None

    def plan(self, start: StartRound, key: bytes) -> RoundPlan:
        """Return the settings of this node's ranks."""
        nodes = self.nodes
        return RoundPlan(
            round=start.round,
            world_size=nodes.count * self.procs,
            first_rank=Rank(nodes.rank * self.procs),
            procs=self.procs,
            group_rank=nodes.rank,
            master_address=nodes.host if nodes.count > 1 else LOOPBACK,
            master_port=start.store_port,
            run_id=nodes.run_id,
            scratch_dir=self.scratch_dir,
            store_secret=store_secret(key, start.store_salt),
            max_restarts=start.max_restarts,
        )


class Leader:
    """Runs rounds until all ranks of all nodes return 0 or no restarts are left."""

    def __init__(self, processes: Processes, options: GangOptions, members: Members) -> None:
        self._processes = processes
        self._options = options
        self._members = members
        # A single node has no shared secret to begin with.
        self._key = run_key(options.nodes) if options.nodes.count > 1 else secrets.token_bytes(32)
        self._is_stopping = False

    def stop(self) -> None:
        """Do not restart the ranks any more, and stop the ranks of the other nodes."""
        self._is_stopping = True
        self._members.stop()

    async def run(self) -> int:
        """Run the rounds. Return 0, or the exit code of the rank that failed first in the last round.

        Raises ConfigError if this node cannot listen, and UnavailableError if a node does not join.
        """
        code, reason = 1, "the launcher of node 0 has ended"
        try:
            await self._members.open()
            code, reason = await self._rounds()
            return code
        except HoldfastError as error:
            reason = str(error)
            raise
        finally:
            if self._is_stopping:
                code, reason = EXIT_STOPPED, "the run was asked to stop"
            await self._members.leave(code, reason)

    async def _rounds(self) -> tuple[int, str]:
        while True:
            await self._members.gather()
            round_ = self._members.next_round
            failed = await self._run_round(round_)
            if failed is None:
                return 0, "all ranks returned 0"
            if self._is_stopping:
                return failed.code, failed.what
            left = self._options.max_restarts - round_
            logger.error(
                "%s in round %d; %s",
                failed.what,
                round_,
                f"restarting all ranks in place ({left} restarts left)"
                if left > 0
                else "no restarts are left (--max-restarts)",
            )
            if left <= 0:
                return failed.code, f"{failed.what}, and no restarts are left"

    async def _run_round(self, round_: RestartRound) -> Failure | None:
        """Run one round and end all its processes. Return why it failed, or None."""
        nodes = self._options.nodes
        store, port = await self._processes.fork_store(LOOPBACK if nodes.count == 1 else "")
        start = StartRound(round_, port, secrets.token_hex(_SALT_BYTES), self._options.max_restarts)
        gang = Gang(self._processes, self._options.plan(start, self._key))
        try:
            self._members.start(start)
            await gang.start()
            return await first_failure(_own_failure(gang), self._members.failure())
        finally:
            await asyncio.gather(gang.end(), self._members.end(round_))
            self._processes.end_store(store)


async def _own_failure(gang: Gang) -> Failure | None:
    """Wait until a rank of this node fails. Return None when all have returned 0."""
    seen: set[Rank] = set()
    while (ended := await gang.next_end(seen)) is not None:
        seen.add(ended.rank)
        if ended.code != 0:
            return Failure.of_rank(ended.rank, ended.code)
    return None
