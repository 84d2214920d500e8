"""A worker follows the plan of its coordinator, and a relay keeps it for its group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.sidecar.waiting import until

from holdfast_core.errors import RefusedError, UnavailableError
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import Plan, Refusal
from holdfast_core.tasks import Signal
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.wire.following import Follower, PlanBoard, is_newer

ROUND = RestartRound(0)
GANG = round_message(workers=6, coordinator=Worker(0), fan_in=3)
"""Worker 0 coordinates and serves workers 1 and 2 itself. Worker 3 is the relay of 4 and 5."""


def plan(coordinator: str, version: int, **fields: Any) -> Plan:
    return Plan(ROUND, coordinator=coordinator, version=version, **fields)


plans = st.builds(plan, st.sampled_from(["", "a", "b"]), st.integers(0, 3))


@given(plans, plans)
def test_of_two_plans_of_a_process_at_most_one_is_newer(one: Plan, other: Plan) -> None:
    forth = is_newer(one, other.coordinator, other.version)
    back = is_newer(other, one.coordinator, one.version)
    if one.coordinator == other.coordinator:
        assert not (forth and back)
    assert not is_newer(one, one.coordinator, one.version)
    assert not (one.coordinator == "" and forth), "no plan is newer than none"


async def test_a_worker_waits_until_there_is_a_plan_that_it_lacks() -> None:
    board = PlanBoard(ROUND)
    waiting = asyncio.create_task(board.newer(Worker(4), "", 0, 3600))
    await asyncio.sleep(0)
    assert not waiting.done()
    board.publish(plan("a", 2, write=Step(1)))
    assert (await waiting).write == 1
    board.publish(plan("a", 1))
    assert board.plan.version == 2, "one that was overtaken"
    assert (await board.newer(Worker(4), "b", 7, 3600)).version == 2, "of another process"
    assert (await board.newer(Worker(4), "a", 2, 0.0)).version == 2, "after the time-out"
    assert board.is_known_to([Worker(4)])
    assert not board.is_known_to([Worker(4), Worker(5)])
    waiting = asyncio.create_task(board.newer(Worker(4), "a", 2, 3600))
    await asyncio.sleep(0)
    board.close()
    await asyncio.wait_for(waiting, HANG_SECONDS)


# --------------------------------------------------------------------------- a worker that follows


class World:
    """A worker that follows the plan, and what its coordinator answers."""

    def __init__(self, worker: int) -> None:
        self.board = PlanBoard(ROUND)
        """Of the coordinator. `answer` may put another one, or an error, in its place."""
        self.error: Exception | None = None
        self.asked: list[tuple[int, int, str, int]] = []
        """Of each request the worker that was asked, the round, and the process and version known."""
        self.taken: list[Plan] = []
        self.clock = ManualClock()
        self.current = CurrentRound(accepted(GANG, worker=worker))
        taken: Signal[[Plan]] = Signal()
        taken.subscribe(self.taken.append)
        pod = Pod(Settings(contract_with()), self.clock, self.current)
        self.follower = Follower(pod, cast(Any, self), self._own_plan, taken)

    async def plan(
        self, coordinator: Worker, round_: RestartRound, known: Plan, timeout_seconds: float
    ) -> Plan:
        """Answer as the coordinator does over the network."""
        assert coordinator != self.current.state.worker, "no request to the own pod"
        return await self._answer(coordinator, round_, known.coordinator, known.version)

    async def _own_plan(
        self, worker: Worker, coordinator: str, since: int, timeout_seconds: float
    ) -> Plan:
        return await self._answer(worker, self.current.state.round, coordinator, since)

    async def _answer(
        self, asked: Worker, round_: RestartRound, coordinator: str, since: int
    ) -> Plan:
        self.asked.append((asked, round_, coordinator, since))
        if self.error is not None:
            raise self.error
        return await self.board.newer(Worker(9), coordinator, since, 3600)

    async def takes(self, *versions: int) -> None:
        """Wait until exactly these plans were carried out."""
        await until(lambda: [plan.version for plan in self.taken] == list(versions), "the plans")


@asynccontextmanager
async def following(worker: int = 1) -> AsyncIterator[World]:
    world = World(worker)
    world.follower.start()
    try:
        yield world
    finally:
        await world.follower.close()


async def test_each_newer_plan_is_carried_out_once() -> None:
    async with following() as world:
        world.board.publish(plan("a", 1, write=Step(1)))
        await world.takes(1)
        world.board.publish(plan("a", 3, write=Step(3)))
        await world.takes(1, 3)
        await until(lambda: len(world.asked) == 3, "the next request")
        assert world.asked == [(0, 0, "", 0), (0, 0, "a", 1), (0, 0, "a", 3)]


async def test_the_worker_of_the_coordinator_asks_no_other() -> None:
    async with following(worker=0) as world:
        world.board.publish(plan("a", 1))
        await world.takes(1)


async def test_a_plan_that_arrives_again_changes_nothing() -> None:
    """The coordinator answers with the plan that the worker has, when the time-out of a request ends."""
    async with following() as world:
        world.board.publish(plan("a", 2))
        await world.takes(2)
        world.board.close()  # its requests end at once with the present plan
        world.board, ended = PlanBoard(ROUND), world.board
        await until(lambda: len(world.asked) >= 3, "another request")
        assert ended.plan.version == 2
        await world.takes(2)


async def test_a_worker_that_restarts_gets_the_whole_plan_again() -> None:
    board = PlanBoard(ROUND)
    board.publish(plan("a", 7, drop=(Step(1),), write=Step(8)))
    for _ in range(2):
        async with following() as world:
            world.board.publish(board.plan)
            await world.takes(7)
            assert (world.taken[0].drop, world.taken[0].write) == ((1,), 8)


@pytest.mark.fault("The coordinator restarts and counts its plans from 1 again")
async def test_the_plan_of_a_coordinator_that_restarts_is_newer_at_any_version() -> None:
    async with following() as world:
        world.board.publish(plan("a", 9))
        await world.takes(9)
        old, world.board = world.board, PlanBoard(ROUND)
        world.board.publish(plan("b", 1))
        old.close()
        await world.takes(9, 1)


@pytest.mark.fault("The coordinator does not answer a worker that asks for the plan")
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(UnavailableError("no reply"), id="gone"),
        pytest.param(RefusedError(Refusal.NOT_COORDINATOR, "worker 0 is sealed"), id="sealed"),
    ],
)
async def test_a_worker_asks_again_until_the_coordinator_answers(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with following() as world:
        world.board.publish(plan("a", 1))
        await world.takes(1)
        world.error = error
        world.board.close()
        for times in (3, 4, 5):
            await until(lambda: world.clock.sleepers == 1, "the back-off")
            world.clock.advance(60)
            await until(lambda n=times: len(world.asked) >= n, "the next attempt")  # type: ignore[misc]
        world.error, world.board = None, PlanBoard(ROUND)
        world.board.publish(plan("a", 2))
        world.clock.advance(60)
        await world.takes(1, 2)
    assert sum(str(error) in record.message for record in caplog.records) == 1, "it is logged once"


async def test_a_plan_of_an_older_round_is_not_carried_out() -> None:
    async with following() as world:
        await until(lambda: len(world.asked) == 1, "the request in round 0")
        message = round_message(1, workers=6, fan_in=3)
        old, world.board = world.board, PlanBoard(RestartRound(1))
        world.current.state = accepted(message, worker=1)
        old.publish(plan("a", 5))
        await until(lambda: len(world.asked) == 2, "the request in round 1")
        assert world.asked[1] == (0, 1, "", 0), "nothing is known of the plans of the new round"
        world.board.publish(replace(plan("b", 1), round=RestartRound(1)))
        await world.takes(1)
        assert world.follower.board.plan.round == 1


async def test_a_worker_that_is_sealed_asks_for_no_plan() -> None:
    async with following() as world:
        await until(lambda: len(world.asked) == 1, "the first request")
        old, world.board = world.board, PlanBoard(RestartRound(1))
        world.current.state = replace(
            accepted(GANG, worker=1), round=RestartRound(1), accepted=None
        )
        old.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(world.asked) == 1
        world.current.state = accepted(round_message(1, workers=6, fan_in=3), worker=1)
        await until(lambda: len(world.asked) == 2, "the request of the new round")


@pytest.mark.fault("The coordinator's pod freezes, and another worker coordinates the round")
async def test_a_request_to_a_frozen_coordinator_does_not_hold_up_the_next_one() -> None:
    async with following() as world:
        await until(lambda: len(world.asked) == 1, "the request that is never answered")
        world.board = PlanBoard(ROUND)
        world.board.publish(plan("b", 1))
        world.current.state = accepted(replace(GANG, version=2, coordinator=Worker(5)), worker=1)
        await world.takes(1)
        assert [request[0] for request in world.asked[:2]] == [0, 5]


# --------------------------------------------------------------------------- the release of a relay


async def test_a_new_coordinator_takes_no_plan_that_was_made_for_others() -> None:
    """A relay may still hold its last request, and passes on what the new coordinator has for its group."""
    async with following(worker=3) as world:
        world.board.publish(plan("a", 4))
        await world.takes(4)
        await until(lambda: len(world.asked) == 2, "the request that the relay holds")
        of_relay, world.board = world.board, PlanBoard(ROUND)
        world.current.state = accepted(replace(GANG, version=2, coordinator=Worker(3)), worker=3)
        of_relay.publish(plan("b", 9))
        world.board.publish(plan("b", 2, write=Step(7)))
        await world.takes(4, 2)
        assert world.asked[2] == (3, 0, "", 0), "its own coordinator counts other versions"


async def test_a_relay_that_coordinated_passes_on_no_plan_of_its_own() -> None:
    """Its group would store a manifest that the new coordinator may not have."""
    async with following(worker=3) as world:
        world.current.state = accepted(replace(GANG, coordinator=Worker(3)), worker=3)
        world.board.publish(plan("a", 4))
        await world.takes(4)
        waiting = asyncio.create_task(world.follower.board.newer(Worker(4), "a", 4, 3600))
        world.current.state = accepted(replace(GANG, version=2), worker=3)
        assert (await asyncio.wait_for(waiting, HANG_SECONDS)).version == 4, "the wait has ended"
        assert world.follower.board.plan == Plan(ROUND)


@pytest.mark.fault(
    "A worker asks its relay for the plan before the relay follows that of the round"
)
async def test_a_relay_has_no_plan_of_the_last_round_in_the_next() -> None:
    """It would answer at once, and the worker would ask again at once, a thousand times a second."""
    async with following(worker=3) as world:
        world.board.publish(plan("a", 4))
        await world.takes(4)
        world.error = UnavailableError("the coordinator is gone")
        world.board.close()
        await until(lambda: world.clock.sleepers == 1, "the back-off")
        world.current.state = accepted(round_message(1, workers=6, fan_in=3), worker=3)
        waiting = asyncio.create_task(world.follower.board.newer(Worker(4), "", 0, 3600))
        await asyncio.sleep(0)
        assert not waiting.done()
        world.error, world.board = None, PlanBoard(RestartRound(1))
        world.board.publish(replace(plan("b", 1), round=RestartRound(1)))
        world.clock.advance(60)
        assert (await asyncio.wait_for(waiting, HANG_SECONDS)).round == 1


async def test_a_relay_is_released_when_its_group_knows_it() -> None:
    async with following(worker=3) as world:
        world.board.publish(plan("a", 1, released=True))
        await until(lambda: len(world.taken) == 1, "the plan without the release")
        assert not world.taken[0].released
        for worker in (4, 5):
            assert not world.taken[-1].released
            await world.follower.board.newer(Worker(worker), "a", 1, 0.0)
        await until(lambda: world.clock.sleepers == 1, "the next look")
        world.clock.advance(0.5)
        await world.takes(1, 1)
        assert world.taken[1].released


async def test_a_relay_does_not_wait_for_ever_for_its_group() -> None:
    async with following(worker=3) as world:
        world.board.publish(plan("a", 1, released=True))
        await until(lambda: world.clock.sleepers == 1, "the first look")
        world.clock.advance(Settings(contract_with()).release_seconds + 1)
        await world.takes(1, 1)
        assert world.taken[1].released


async def test_a_relay_that_is_sealed_is_not_released() -> None:
    async with following(worker=3) as world:
        world.board.publish(plan("a", 1, released=True))
        await until(lambda: world.clock.sleepers == 1, "the first look")
        world.current.state = replace(
            accepted(GANG, worker=3), round=RestartRound(1), accepted=None
        )
        world.clock.advance(3600)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [found.released for found in world.taken] == [False]
