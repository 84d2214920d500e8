"""`holdfast run` without a sidecar: runs ranks on one machine and restarts them all when one fails.

It behaves like `torchrun --standalone`. Every round has its own store process, and its ranks are forked
from the same fork server. `Checkpointer(dir=...)` decides from which step a round starts.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from dataclasses import dataclass

from holdfast.launcher.gang import STORE_SECRET_BYTES, Gang, RoundPlan
from holdfast.launcher.processes import Processes, RankProcess
from holdfast_core.ids import Rank, RestartRound

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StandaloneOptions:
    procs: int
    max_restarts: int
    scratch_dir: str | None


class StandaloneLauncher:
    """Runs rounds until all ranks return 0 or no restarts are left."""

    def __init__(self, processes: Processes, options: StandaloneOptions) -> None:
        self._processes = processes
        self._options = options
        self._run_id = f"holdfast-{uuid.uuid4().hex[:12]}"
        self._stopping = False

    def stop(self) -> None:
        """Do not restart the ranks any more."""
        self._stopping = True

    async def run(self) -> int:
        """Run the rounds. Return 0, or the exit code of the rank that failed first in the last round."""
        round_ = RestartRound(0)
        while True:
            failed = await self._run_round(round_)
            if failed is None:
                return 0
            if self._stopping:
                return _exit_code(failed.code)
            left = self._options.max_restarts - round_
            logger.error(
                "rank %d ended with code %s in round %d; %s",
                failed.rank,
                failed.code,
                round_,
                f"restarting all ranks in place ({left} restarts left)"
                if left > 0
                else "no restarts are left (--max-restarts)",
            )
            if left <= 0:
                return _exit_code(failed.code)
            round_ = RestartRound(round_ + 1)

    async def _run_round(self, round_: RestartRound) -> RankProcess | None:
        """Run one round and end all its processes.

        Returns the rank that failed first, or None when all ranks returned 0.
        """
        store, port = await self._processes.fork_store(_LOOPBACK)
        plan = RoundPlan(
            round=round_,
            world_size=self._options.procs,
            first_rank=Rank(0),
            procs=self._options.procs,
            group_rank=0,
            master_address=_LOOPBACK,
            master_port=port,
            run_id=self._run_id,
            scratch_dir=self._options.scratch_dir,
            store_secret=secrets.token_hex(STORE_SECRET_BYTES),
            max_restarts=self._options.max_restarts,
        )
        gang = Gang(self._processes, plan)
        try:
            await gang.start()
            seen: set[Rank] = set()
            while (ended := await gang.next_end(seen)) is not None:
                seen.add(ended.rank)
                if ended.code != 0:
                    return ended
            return None
        finally:
            await gang.end()
            self._processes.end_store(store)


def _exit_code(code: int | None) -> int:
    """Return the exit code as a shell reports it: 128 + N for signal N."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code
