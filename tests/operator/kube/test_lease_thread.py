"""The lease is renewed while the operator's event loop stands still, over an in-memory API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.operator.fake_api import FakeApi

from holdfast_core.clock import SystemClock
from holdfast_operator.kube.leadership import Leadership, LeaseLostError, LeaseName, LeaseThread

NAME = LeaseName("holdfast-system", "holdfast")
KEY = ("leases", "holdfast-system", "holdfast")


class QuickClock(SystemClock):
    """Clock that leaves out the pauses between renewals."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.001)


@dataclass
class CountingApi(FakeApi):
    """API that tells another thread when the lease has been renewed a few times."""

    renewals: int = 0
    renewed: threading.Event = field(default_factory=threading.Event)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def patch(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        self.renewals += 1
        if self.renewals >= 3:
            self.renewed.set()
        return await super().patch(path, body, params)


def part_in_election(api: CountingApi) -> LeaseThread:
    return LeaseThread(Leadership(api, NAME, "a", QuickClock()), api)


async def test_the_lease_is_renewed_while_the_event_loop_stands_still() -> None:
    api = CountingApi()
    lease = part_in_election(api)
    task = asyncio.create_task(lease.run())
    await asyncio.wait_for(lease.gained.wait(), HANG_SECONDS)
    api.renewals = 0
    api.renewed.clear()
    assert api.renewed.wait(HANG_SECONDS), "no renewal while the event loop was held"
    assert lease.leads

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert lease.leads, "the process may still have writes under way"
    await lease.release()
    assert not lease.leads
    assert api.objects[KEY]["spec"].get("holderIdentity") is None


async def test_a_lost_lease_ends_the_run_in_the_event_loop_of_the_caller() -> None:
    api = CountingApi()
    lease = part_in_election(api)
    task = asyncio.create_task(lease.run())
    await asyncio.wait_for(lease.gained.wait(), HANG_SECONDS)
    other = api.objects[KEY]
    api.put("leases", other | {"spec": other["spec"] | {"holderIdentity": "b"}})
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(task, HANG_SECONDS)
    assert not lease.leads
    await lease.release()
    assert api.objects[KEY]["spec"]["holderIdentity"] == "b"
