"""A spare pod has no worker until ROUND names it, and then it is this worker for good (ADR 0015)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.support.sidecar.gang import Gangs

from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import FIRST_SPARE, Level, Worker

pytestmark = pytest.mark.integration


@pytest.mark.fault(
    "The sidecar of a promoted spare restarts, or ROUND names its pod as another worker"
)
async def test_a_spare_restores_the_shards_of_the_worker_that_it_becomes(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        await gang.start()
        saved = await gang.commit(1, Level.REPLICATED)
        point = await gang.point(1)

        await gang.launch(FIRST_SPARE)
        before = await gang.operator.inventory(FIRST_SPARE)
        assert (before.worker, before.launcher, before.shards) == (FIRST_SPARE, False, ())
        await gang.launcher(FIRST_SPARE)
        assert (await gang.operator.inventory(FIRST_SPARE)).launcher
        early = await gang.connect_rank(FIRST_SPARE, 0)
        save = asyncio.ensure_future(early.save(2, b"too early"))
        await gang.operator.inventory(FIRST_SPARE)
        gang.ranks.pop(FIRST_SPARE).close()
        with pytest.raises(UnavailableError):
            await save

        gang.lose(1)
        spare = gang.operator.members.pop(FIRST_SPARE)
        gang.operator.members[1] = replace(spare, worker=Worker(1))
        gang.sidecars[1] = gang.sidecars.pop(FIRST_SPARE)
        gang.launchers[1] = gang.launchers.pop(FIRST_SPARE)
        for worker in (0, 1):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=point)
        assert await gang.restored() == saved
        assert (await gang.operator.inventory(1)).worker == 1
        await gang.commit(2, Level.REPLICATED)

        gang.sidecars[1].kill()
        gang.launchers[1].close()
        await gang.relaunch(1)
        again = await gang.operator.inventory(1)
        assert (again.worker, again.round) == (1, 1)
        assert [m.step for m in again.manifests.values()] == [1, 2]
        wrong = gang.operator.message(1, version=5, copies=())
        swapped = tuple(replace(m, worker=Worker(1 - m.worker)) for m in wrong.members)
        with pytest.raises(HoldfastError, match=r"names pod .* as worker 0: it is worker 1"):
            await gang.operator.round(1, replace(wrong, members=swapped))
