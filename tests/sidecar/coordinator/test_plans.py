"""The plan that the coordinator publishes: whom it releases when, and requests that it passes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.clock import ManualClock
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.ledgers import commit, new_ledger
from tests.support.sidecar.rounds import round_message

from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import GangRequest, Plan
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.coordinator.plan import plan as planned
from holdfast_sidecar.wire.following import Plans
from holdfast_sidecar.wire.verbs import SAVE_NOW, STOP

WORKERS = 6
OWN, MEMBER, RELAY = Worker(0), Worker(1), Worker(3)
ROUND = RestartRound(1)


class World:
    """The plans of a coordinator at worker 0. Workers 1 and 2 are in its group, 3 is the relay of 4 and 5."""

    def __init__(self) -> None:
        self.ledger = new_ledger(workers=WORKERS, expects_copies=False)
        self.clock = ManualClock()
        message = round_message(1, workers=WORKERS, fan_in=3)
        self.plans = Plans(
            Settings(contract_with()),
            self.clock,
            message,
            lambda own, released: planned(self.ledger, released=released, is_first=own),
        )
        self.plans.wake()

    async def of(self, worker: Worker, known: Plan | None = None) -> Plan:
        """Return the plan of a worker that has this one."""
        known = known or Plan(ROUND)
        return await self.plans.newer(worker, known.coordinator, known.version, 0.05)

    async def know(self, *workers: int) -> None:
        """Let workers ask for the plan after the present one, as they do when they have passed it on."""
        for worker in map(Worker, workers):
            plan = await self.of(worker)
            assert (await self.of(worker, plan)).version == plan.version

    async def pause(self) -> None:
        """Let the next look at what the workers know happen."""
        await asyncio.sleep(0)
        self.clock.advance(0.5)
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def running() -> AsyncIterator[World]:
    world = World()
    await asyncio.sleep(0)
    try:
        yield world
    finally:
        await world.plans.close()


async def test_a_change_makes_a_newer_plan_and_no_change_none() -> None:
    async with running() as world:
        before = await world.of(MEMBER)
        assert (before.version, before.levels) == (1, ())
        world.plans.wake()
        await asyncio.sleep(0)
        assert await world.of(MEMBER, before) == before
        commit(world.ledger, 5)
        world.plans.wake()
        world.ledger.forget((Step(5),))
        world.plans.wake()
        await asyncio.sleep(0)
        after = await world.of(MEMBER, before)
        assert (after.version, after.drop) == (2, (5,)), "changes that come together go together"
        assert await world.of(RELAY) == after, "it is whole, whatever a worker has"


async def test_a_request_is_passed_on_once() -> None:
    async with running() as world:
        assert world.plans.request(SAVE_NOW, GangRequest(ROUND, "one"), Step(7))
        assert not world.plans.request(SAVE_NOW, GangRequest(ROUND, "one"), Step(9))
        await asyncio.sleep(0)
        plan = await world.of(OWN)
        assert (plan.save_from, plan.stop) == (8, False)
        assert world.plans.request(STOP, GangRequest(ROUND, "two"), Step(9))
        await asyncio.sleep(0)
        plan = await world.of(OWN)
        assert (plan.save_from, plan.stop) == (8, True)
        assert world.plans.save_tokens == ("one",)


@pytest.mark.fault("Two saves are requested before the first request has reached rank 0")
async def test_requests_in_quick_succession_ask_for_one_save_that_fulfils_both() -> None:
    async with running() as world:
        for token, after in (("one", 7), ("two", 8), ("late", 7)):
            assert world.plans.request(SAVE_NOW, GangRequest(ROUND, token), Step(after))
        await asyncio.sleep(0)
        assert (await world.of(OWN)).save_from == 9


@pytest.mark.fault("A worker does not answer its release while the coordinator could end")
async def test_the_own_pod_is_released_after_all_that_it_serves_know_it() -> None:
    async with running() as world:
        world.plans.release()
        world.plans.release()
        assert (await world.of(MEMBER)).released
        assert not (await world.of(OWN)).released
        await world.know(1, 3)
        await world.pause()
        assert not (await world.of(OWN)).released, "worker 2 does not know it"
        await world.know(2)
        await world.pause()
        assert (await world.of(OWN)).released


@pytest.mark.fault("A pod ends before it has confirmed its release")
async def test_the_own_pod_does_not_wait_for_ever() -> None:
    async with running() as world:
        world.plans.release()
        await asyncio.sleep(0)
        world.clock.advance(Settings(contract_with()).release_seconds)
        await world.pause()
        assert (await world.of(OWN)).released
