"""Operator processes that elect a leader by a lease, over an in-memory API and with manual clocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from tests.support.clock import ManualClock
from tests.support.operator.fake_api import FakeApi

from holdfast_operator.kube.api import ApiError, KubeAccess, KubeApi
from holdfast_operator.kube.leadership import (
    Leadership,
    LeaseLostError,
    LeaseName,
)

NAME = LeaseName("holdfast-system", "holdfast")
KEY = ("leases", "holdfast-system", "holdfast")
LEASE_SECONDS, WRITE_SECONDS, RENEW_SECONDS = 10, 7.0, 2.0
"""The times of a lease of 10 seconds, which is the default."""
AWAY = {(m, "leases"): ApiError(None, "", "refused") for m in ("GET", "POST", "PATCH")}


class ClockOfFrozenProcess(ManualClock):
    """Clock that goes on while its process is frozen: time passes, and no sleep of the process ends."""

    frozen_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.frozen_seconds


@dataclass
class ApiWithLateRenewal(FakeApi):
    """An API server that carries out a renewal late, after the next read of the lease."""

    late: bool = False

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        found = await super().get(path, params)
        if self.late:
            self.late = False
            self.touch(self.objects[KEY])
        return found


@dataclass
class Process:
    """One process: its part in the election, and the task that runs it."""

    leadership: Leadership
    task: asyncio.Task[None]

    @property
    def leads(self) -> bool:
        return self.leadership.leads

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Election:
    api: FakeApi = field(default_factory=FakeApi)
    clock: ManualClock = field(default_factory=ManualClock)
    processes: list[Process] = field(default_factory=list)

    async def start(
        self, name: str, clock: ManualClock | None = None, lease_seconds: int = LEASE_SECONDS
    ) -> Process:
        leadership = Leadership(self.api, NAME, name, clock or self.clock, lease_seconds)
        process = Process(leadership, asyncio.create_task(leadership.run()))
        self.processes.append(process)
        await settle()
        return process

    async def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            await settle()

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.api.objects[KEY]["spec"])


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def election(api: FakeApi | None = None) -> AsyncIterator[Election]:
    found = Election(api or FakeApi())
    try:
        yield found
    finally:
        for process in found.processes:
            await process.kill()


async def test_the_first_process_leads_and_renews_and_the_second_is_a_standby() -> None:
    async with election() as e:
        first, second = await e.start("a"), await e.start("b")
        await e.wait(10 * LEASE_SECONDS)
        assert (first.leads, second.leads) == (True, False)
        assert e.spec["holderIdentity"] == "a"
        assert e.spec["leaseTransitions"] == 0
        assert not second.leadership.gained.is_set()


async def test_a_standby_takes_over_from_a_killed_leader_within_fifteen_seconds() -> None:
    async with election() as e:
        first, second = await e.start("a"), await e.start("b")
        await e.wait(30)
        await first.kill()
        await e.wait(15)
        assert second.leads
        assert e.spec["holderIdentity"] == "b"
        assert e.spec["leaseTransitions"] == 1


async def test_a_standby_waits_for_the_duration_that_the_leader_has_set() -> None:
    """During an upgrade that changes the setting, two processes have different durations."""
    async with election() as e:
        first, second = await e.start("a", lease_seconds=60), await e.start("b", lease_seconds=2)
        await first.kill()
        await e.wait(45)
        assert not second.leads
        await e.wait(20)
        assert second.leads
        assert e.spec["leaseDurationSeconds"] == 2


async def test_a_leader_stops_to_write_before_a_short_lease_ends() -> None:
    async with election() as e:
        first, second = await e.start("a", lease_seconds=4), await e.start("b", lease_seconds=4)
        assert first.leads
        e.api.refuse.update(AWAY)
        await e.wait(2.5)
        assert first.leads
        await e.wait(0.5)
        assert not first.leads
        assert not second.leads


async def test_a_standby_takes_over_at_once_when_the_lease_is_given_back() -> None:
    async with election() as e:
        first, second = await e.start("a"), await e.start("b")
        await first.kill()
        await first.leadership.release()
        assert not first.leads
        await e.wait(1)
        assert second.leads


async def test_a_renewal_that_arrives_late_does_not_keep_the_lease_from_being_given_back() -> None:
    api = ApiWithLateRenewal()
    async with election(api) as e:
        first, second = await e.start("a"), await e.start("b")
        await first.kill()
        api.late = True
        await first.leadership.release()
        assert "holderIdentity" not in e.spec
        await e.wait(1)
        assert second.leads


async def test_a_container_that_is_restarted_in_its_pod_leads_at_once() -> None:
    async with election() as e:
        await (await e.start("a")).kill()
        assert (await e.start("a")).leads


async def test_a_process_that_does_not_lead_gives_no_lease_back() -> None:
    async with election() as e:
        first, second = await e.start("a"), await e.start("b")
        await second.kill()
        await second.leadership.release()
        await e.wait(LEASE_SECONDS)
        assert first.leads
        assert e.spec["holderIdentity"] == "a"


@pytest.mark.fault("A leader is frozen for longer than its lease")
async def test_a_frozen_leader_stops_writing_before_another_process_can_lead() -> None:
    """Its clock goes on while it is frozen. It writes nothing when it continues, and it ends."""
    async with election() as e:
        frozen = ClockOfFrozenProcess()
        first, second = await e.start("a", frozen), await e.start("b")
        first.leadership.check()
        both = False
        for _ in range(40):
            frozen.frozen_seconds += 0.5
            e.clock.advance(0.5)
            await settle()
            both |= first.leads and second.leads
        assert not both
        assert second.leads
        with pytest.raises(ApiError, match="another operator may lead"):
            first.leadership.check()
        frozen.advance(RENEW_SECONDS)
        with pytest.raises(LeaseLostError, match="b has taken it"):
            await first.task
        assert e.spec["holderIdentity"] == "b"


@pytest.mark.fault("The leader cannot renew its lease for a time")
async def test_a_leader_that_cannot_renew_stops_writing_and_goes_on_after_the_outage() -> None:
    async with election() as e:
        first = await e.start("a")
        e.api.refuse.update(AWAY)
        await e.wait(WRITE_SECONDS + RENEW_SECONDS)
        assert not first.leads
        e.api.refuse.clear()
        await e.wait(RENEW_SECONDS)
        assert first.leads
        assert e.spec["leaseTransitions"] == 0


@pytest.mark.fault("The API server is away for ten minutes while two operators run")
async def test_an_outage_of_the_api_server_does_not_change_the_leader() -> None:
    """The standby counts only time in which it has read the lease."""
    async with election() as e:
        first, second = await e.start("a"), await e.start("b")
        e.api.refuse.update(AWAY)
        await e.wait(600)
        e.api.refuse.clear()
        await e.wait(LEASE_SECONDS)
        assert (first.leads, second.leads) == (True, False)


async def test_a_standby_waits_for_the_duration_that_the_holder_has_set() -> None:
    """The holder may be of another version, with a longer lease."""
    async with election() as e:
        spec = {"holderIdentity": "newer", "leaseDurationSeconds": 60}
        e.api.put("leases", {"metadata": {"namespace": KEY[1], "name": KEY[2]}, "spec": spec})
        process = await e.start("a")
        await e.wait(59)
        assert not process.leads
        await e.wait(3)
        assert process.leads


@pytest.mark.parametrize("rest", [{}, {"spec": None}, {"spec": {"holderIdentity": ""}}])
async def test_a_lease_without_a_holder_is_taken(rest: dict[str, Any]) -> None:
    async with election() as e:
        e.api.put("leases", {"metadata": {"namespace": KEY[1], "name": KEY[2]}, **rest})
        assert (await e.start("a")).leads


@pytest.mark.fault("Several operators take the lease together")
async def test_of_two_processes_that_take_the_lease_together_one_leads() -> None:
    async with election() as e:
        spec = {"holderIdentity": "gone", "leaseDurationSeconds": 10}
        e.api.put("leases", {"metadata": {"namespace": KEY[1], "name": KEY[2]}, "spec": spec})
        processes = [await e.start(name) for name in "abc"]
        await e.wait(3 * LEASE_SECONDS)
        assert [p.leads for p in processes].count(True) == 1


@pytest.mark.fault("The lease is deleted")
async def test_a_deleted_lease_is_created_again_by_its_leader() -> None:
    async with election() as e:
        first = await e.start("a")
        e.api.remove(*KEY)
        await e.wait(RENEW_SECONDS)
        assert first.leads
        assert e.spec["holderIdentity"] == "a"


async def test_a_session_sends_no_write_without_the_lease_and_every_read() -> None:
    def refuse() -> None:
        raise ApiError(None, "NotLeading", "no lease")

    api = KubeApi(KubeAccess("http://127.0.0.1:1"), refuse)
    await api.start()
    try:
        for write in (api.post("/a", {}), api.patch("/a", {}), api.delete("/a")):
            with pytest.raises(ApiError, match="no lease"):
                await write
        with pytest.raises(ApiError, match="/a failed") as caught:
            await api.get("/a")
        assert isinstance(caught.value.__cause__, aiohttp.ClientConnectionError)
    finally:
        await api.close()
