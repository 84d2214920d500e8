"""Which reflectors count as stalled, so that the kubelet restarts the operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.clock import ManualClock
from tests.support.operator.fake_api import FakeApi

from holdfast_operator.kube.api import ApiError
from holdfast_operator.watch.cache import STALLED_SECONDS, ClusterCache


class StoppableClock(ManualClock):
    """Clock that can go on while all sleeps last for ever."""

    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


@asynccontextmanager
async def watching(api: FakeApi, clock: ManualClock) -> AsyncIterator[ClusterCache]:
    cache = ClusterCache(api, clock, (), lambda key: None, lambda job: None)
    task = asyncio.create_task(cache.run())
    try:
        yield cache
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.fault("The API server refuses everything for minutes")
@pytest.mark.parametrize("status", [None, 403, 410, 500])
async def test_no_watch_is_stalled_while_the_api_server_refuses_everything(
    status: int | None,
) -> None:
    api, clock = FakeApi(), ManualClock()
    for plural in ("trainingjobs", "pods", "nodes", "leases"):
        api.refuse["LIST", plural] = ApiError(status, "Injected", "injected")
    async with watching(api, clock) as cache:
        for _ in range(int(3 * STALLED_SECONDS)):
            clock.advance(1.0)
            await settle()
            assert cache.stalled_watches() == []


@pytest.mark.fault("The loop of a watch stands still")
async def test_a_watch_whose_loop_stands_still_is_stalled() -> None:
    """Its wait before the next request never ends."""
    api, clock = FakeApi(), StoppableClock()
    api.refuse["LIST", "pods"] = ApiError(500, "Injected", "injected")
    async with watching(api, clock) as cache:
        await settle()
        assert cache.stalled_watches() == []
        clock.ahead_seconds = STALLED_SECONDS + 1
        assert {"pods", "adopted-pods"} <= set(cache.stalled_watches())
