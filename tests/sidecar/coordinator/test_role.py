"""A worker that coordinates answers requests for the plan as soon as it has accepted its ROUND."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import RefusedError
from holdfast_core.ids import RestartRound
from holdfast_core.messages.schema import Plan
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import Caller
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.coordinator.coordinator import CoordinatorRole
from holdfast_sidecar.process.control import Control
from holdfast_sidecar.wire.following import PlanBoard

ROUND = RestartRound(1)
MESSAGE = round_message(1)
MEMBER = Caller("gpt-1-r0")


class World:
    """Worker 0, which has accepted a ROUND that it coordinates and has not begun it yet."""

    def __init__(self, folder: Path) -> None:
        self.current = CurrentRound(accepted(MESSAGE))
        self.pools = Pools(disk=1, fetch=1, store=1)
        pod = Pod(Settings(contract_with(shared_dir=str(folder))), ManualClock(), self.current)
        tiers = Tiers(ScratchTier(), None, self.pools)
        self.role = CoordinatorRole(pod, tiers, Failures(lambda: None))
        self.board = PlanBoard(ROUND)
        """What the worker has received from its own coordinator."""
        components = SimpleNamespace(current=self.current, role=self.role)
        receivers = SimpleNamespace(follower=SimpleNamespace(board=self.board))
        self.control = Control(cast(Any, components), cast(Any, None), cast(Any, receivers))

    def asks(self) -> asyncio.Task[Plan]:
        """Let worker 1 ask for the plan, with a time-out that no test reaches."""
        return asyncio.create_task(self.control.plan(MEMBER, ROUND, "", 0, HANG_SECONDS))

    async def close(self) -> None:
        await self.role.end()
        self.pools.close()


@pytest.mark.fault("A worker asks for the plan before its coordinator has begun the round")
async def test_a_plan_is_waited_for_until_the_round_has_begun(tmp_path: Path) -> None:
    """The versions of the coordinator's own plan are counted apart. A worker that had received it would take
    its plans for older ones, and would not learn that its save is committed."""
    world = World(tmp_path)
    asked = world.asks()
    await asyncio.sleep(0)
    world.board.publish(Plan(ROUND, coordinator="own", version=3))
    await asyncio.sleep(0)
    assert not asked.done()
    world.role.begin(MESSAGE)
    plan = await asked
    assert (plan.coordinator != "own", plan.version) == (True, 1)
    await world.close()


async def test_a_wait_for_the_plan_ends_with_the_round(tmp_path: Path) -> None:
    """As when the node tier could not be read when the round was to begin."""
    world = World(tmp_path)
    asked = world.asks()
    await asyncio.sleep(0)
    world.current.state = world.current.state.sealed_for(RestartRound(2))
    await world.role.end()
    with pytest.raises(RefusedError, match="is not the coordinator"):
        await asked
    await world.close()


async def test_a_wait_for_the_plan_ends_after_its_time_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(RefusedError, match="is not the coordinator"):
        await world.control.plan(MEMBER, ROUND, "", 0, 0.0)
    await world.close()
