"""Runs the rounds of a gang on one machine without a sidecar, and restarts all ranks in place.

It behaves like torchrun. Every round has its own store process, and the ranks are forked from the same fork
server. `Checkpointer(dir=...)` decides from which step a round starts.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from holdfast.launcher.ranks.gang import STORE_SECRET_BYTES, Gang, RoundSettings
from holdfast.launcher.ranks.processes import Processes, RankProcess
from holdfast_core.ids import Rank, RestartRound

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class GangOptions:
    """Settings that all rounds of a run share."""

    procs: int
    max_restarts: int
    run_id: str
    scratch_dir: str | None


class StandaloneLauncher:
    """Runs rounds until all ranks return 0 or no restarts are left."""

    def __init__(self, processes: Processes, options: GangOptions) -> None:
        self._processes = processes
        self._options = options
        self._is_stopping = False

    def stop(self) -> None:
        """Do not restart the ranks any more."""
        self._is_stopping = True

    async def run(self) -> int:
        """Run the rounds. Return 0, or the exit code of the rank that failed first in the last round."""
        round_ = RestartRound(0)
        while True:
            failed = await self._run_round(round_)
            if failed is None:
                return 0
            if self._is_stopping:
                return _exit_code(failed)
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
                return _exit_code(failed)
            round_ = RestartRound(round_ + 1)

    async def _run_round(self, round_: RestartRound) -> RankProcess | None:
        """Run one round and end all its processes. Return the rank that failed first, or None."""
        store, port = await self._processes.fork_store(_LOOPBACK)
        options = self._options
        gang = Gang(
            self._processes,
            RoundSettings(
                round=round_,
                world_size=options.procs,
                first_rank=Rank(0),
                procs=options.procs,
                group_rank=0,
                master_address=_LOOPBACK,
                master_port=port,
                run_id=options.run_id,
                scratch_dir=options.scratch_dir,
                store_secret=secrets.token_hex(STORE_SECRET_BYTES),
                max_restarts=options.max_restarts,
            ),
        )
        try:
            await gang.start()
            return await _first_failure(gang)
        finally:
            await gang.end()
            self._processes.end_store(store)


async def _first_failure(gang: Gang) -> RankProcess | None:
    """Wait until a rank fails. Return None when all have returned 0."""
    seen: set[Rank] = set()
    while (ended := await gang.next_end(seen)) is not None:
        seen.add(ended.rank)
        if ended.code != 0:
            return ended
    return None


def _exit_code(failed: RankProcess) -> int:
    """Return the exit code of the run: 128 + N for signal N, as in a shell."""
    code = 1 if failed.code is None else failed.code
    return 128 - code if code < 0 else code
