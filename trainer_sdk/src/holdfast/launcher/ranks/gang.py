"""One round of the ranks of this node: fork them, wait for their ends, and kill them.

The launchers of a pod and of one machine use it, and decide when to do so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from holdfast.base.settings import RankSettings, rank_environment
from holdfast.launcher.ranks.processes import Processes, RankProcess
from holdfast.launcher.ranks.stacks import LocatedRank
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.messages.schema import Timing

STORE_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Settings of the ranks of one round on this node."""

    round: RestartRound
    world_size: int
    first_rank: Rank
    procs: int
    group_rank: int
    master_address: str
    master_port: int
    run_id: str
    interval_steps: int | None = None
    timing: Timing | None = None
    restore_step: Step | None = None
    restore_known: bool = False
    scratch_dir: str | None = None
    store_secret: str | None = field(default=None, repr=False)
    max_restarts: int = 0


def environments(plan: RoundSettings) -> list[tuple[Rank, dict[str, str]]]:
    """Return the variables that each rank of this pod gets, in the order of ranks."""
    result = []
    for local_rank in range(plan.procs):
        rank = Rank(plan.first_rank + local_rank)
        settings = RankSettings(
            rank=rank,
            world_size=plan.world_size,
            local_rank=local_rank,
            local_world_size=plan.procs,
            master_address=plan.master_address,
            master_port=plan.master_port,
            round=plan.round,
            interval_steps=plan.interval_steps,
            timing=plan.timing,
            restore_step=plan.restore_step,
            restore_known=plan.restore_known,
            scratch_dir=plan.scratch_dir,
            store_secret=plan.store_secret,
        )
        env = rank_environment(
            settings,
            group_rank=plan.group_rank,
            run_id=plan.run_id,
            max_restarts=plan.max_restarts,
        )
        result.append((rank, env))
    return result


class Gang:
    """The ranks of one round on this node."""

    def __init__(self, processes: Processes, plan: RoundSettings) -> None:
        self.plan = plan
        self._processes = processes
        self._ranks: list[RankProcess] = []

    async def start(self) -> None:
        """Request the fork of all ranks."""
        for rank, env in environments(self.plan):
            self._ranks.append(await self._processes.fork_rank(rank, env, self.plan.round))

    async def next_end(self, seen: set[Rank]) -> RankProcess | None:
        """Wait for the end of a rank that is not in `seen`, and return it.

        Returns None when all ranks are in `seen`.
        """
        waiting = {
            asyncio.ensure_future(process.ended.wait()): process
            for process in self._ranks
            if process.rank not in seen
        }
        if not waiting:
            return None
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        return min((waiting[future] for future in done), key=lambda process: process.rank)

    async def find_stacks(self) -> tuple[LocatedRank, ...]:
        """Return where each rank is that runs. It takes some seconds."""
        return await self._processes.find_stacks()

    async def end(self) -> None:
        """Kill all ranks and wait until they are reaped."""
        await self._processes.end_ranks()
