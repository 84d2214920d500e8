"""When the coordinator looks for unfinished uploads and for objects that are no longer needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import timedelta

import pytest
from tests.support.shards.builders import JOB_UID
from tests.support.sidecar.contracts import CONTRACT
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.clock import SystemClock
from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.upkeep.prune import Leftovers

BUSY = CheckpointId(Step(5), RestartRound(3))


class CountingTier(ObjectTier):
    """A tier that records its calls. The first call of each kind fails."""

    def __init__(self) -> None:
        super().__init__(MemoryObjectStore())
        self.reaped: list[tuple[str, JobUid, timedelta]] = []
        self.swept: list[tuple[str, JobUid, RestartRound, timedelta]] = []

    def abort_stale(self, namespace: str, job_uid: JobUid, older_than: timedelta) -> int:
        self.reaped.append((namespace, job_uid, older_than))
        if len(self.reaped) == 1:
            raise UnavailableError("no answer")
        return 0

    def sweep(
        self,
        namespace: str,
        job_uid: JobUid,
        round_: RestartRound,
        quiet: timedelta,
        uploading: Callable[[], Collection[CheckpointId]],
    ) -> frozenset[CheckpointId]:
        assert uploading() == {BUSY}
        self.swept.append((namespace, job_uid, round_, quiet))
        if len(self.swept) == 1:
            raise FormatError("references: not understood")
        return frozenset()


class Hours(SystemClock):
    """A clock whose sleeps take no time, and which cancels the sleeper after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    async def sleep(self, seconds: float) -> None:
        self.left -= seconds
        if self.left < 0:
            raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("hours", "reaped", "swept"), [(0.2, 1, 0), (0.5, 1, 2), (5.9, 1, 23), (6, 2, 24), (13, 3, 52)]
)
def test_leftovers_are_looked_for_periodically_although_the_store_fails(
    hours: float, reaped: int, swept: int
) -> None:
    tier = CountingTier()
    pools = Pools(disk=1, fetch=1, store=1)

    async def run() -> None:
        clock = Hours(hours * 3600)
        leftovers = Leftovers(
            CONTRACT,
            RestartRound(3),
            tier,
            pools=pools,
            clock=clock,
            uploading=lambda: frozenset({BUSY}),
        )
        with pytest.raises(asyncio.CancelledError):
            await leftovers.run()

    asyncio.run(run())
    pools.close()
    tier.close()
    assert tier.reaped == [("team-a", JOB_UID, timedelta(hours=24))] * reaped
    assert tier.swept == [("team-a", JOB_UID, RestartRound(3), timedelta(hours=1))] * swept


def test_without_a_store_the_search_for_leftovers_ends() -> None:
    pools = Pools(disk=1, fetch=1, store=1)
    leftovers = Leftovers(
        CONTRACT,
        RestartRound(0),
        None,
        pools=pools,
        clock=SystemClock(),
        uploading=frozenset,
    )
    asyncio.run(leftovers.run())
    pools.close()
