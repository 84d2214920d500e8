"""What the coordinator makes of reports that are late, repeated, partly refused, or without shards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.sidecar.coordinators import CoordinatorWorld
from tests.support.sidecar.ledgers import LAYOUT, OTHER_DIGEST, shard_info
from tests.support.sidecar.waiting import until

from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    DeadRank,
    Ok,
    Plan,
    Policy,
    RankSaves,
    Refusal,
    ReportedShard,
)

ROUND = RestartRound(0)
POLICY = Policy(interval_steps=1, keep_last=2)


class Members:
    """Two members that accept everything."""

    def __init__(self) -> None:
        self.plans: list[tuple[Worker, Plan]] = []

    async def call(self, worker: Worker, message: Any, reply: type[Any], **_: Any) -> Ok:
        await asyncio.sleep(0)
        if isinstance(message, Plan):
            self.plans.append((worker, message))
        return Ok(ROUND)

    @property
    def dropped(self) -> set[Step]:
        return {step for _, plan in self.plans for step in plan.drop}


async def is_local(world: CoordinatorWorld, step: int) -> None:
    await until(lambda: world.coordinator.levels()[Level.LOCAL] == step, f"step {step} is local")


@pytest.mark.fault("A report was on its way for long, and a newer one came first")
async def test_a_late_report_takes_nothing_back(tmp_path: Path) -> None:
    async with CoordinatorWorld(tmp_path, Members(), POLICY) as world:
        world.coordinator.start()
        death = DeadRank(Rank(1), Worker(1), 9)
        world.tell(1, dead=(death,), shards=(world.shard(1, 1, replicated=True),))
        world.tell(1, dead=(), shards=(world.shard(1, 1),))
        world.tell(1, dead=(death,), shards=())
        assert (await world.coordinator.state(0, 0.0, 0.0, acknowledges=False)).dead == (death,)
        world.tell(0, shards=(world.shard(0, 1, replicated=True),))
        await is_local(world, 1)
        await until(lambda: world.coordinator.levels()[Level.REPLICATED] == 1, "it is replicated")


@pytest.mark.fault("The coordinator restarts, and reports lack the shards that the last one had")
async def test_a_new_coordinator_wants_all_shards_and_needs_one_round_of_reports(
    tmp_path: Path,
) -> None:
    members = Members()
    async with CoordinatorWorld(tmp_path, members, POLICY) as world:
        world.coordinator.start()
        world.tell(0, shards=(world.shard(0, 1, replicated=True),))
        saves = (RankSaves(Rank(1), Step(1)),)
        for _ in range(3):  # replies may be lost
            assert world.tell(1, shards=(), has_all_shards=False, saves=saves).wants_shards
            for _ in range(50):
                await asyncio.sleep(0)
        held = (world.shard(1, 1, replicated=True),)
        assert not world.tell(1, shards=held, has_all_shards=True).wants_shards
        await is_local(world, 1)
        await until(lambda: world.coordinator.levels()[Level.REPLICATED] == 1, "it is replicated")
        assert not world.tell(1, shards=(), has_all_shards=False).wants_shards


async def test_a_refused_shard_keeps_nothing_else_of_the_report_back(tmp_path: Path) -> None:
    async with CoordinatorWorld(tmp_path, Members(), POLICY) as world:
        world.coordinator.start()
        world.hold(1, ranks=(1,))
        other = ReportedShard(Step(1), ROUND, shard_info(1, OTHER_DIGEST), LAYOUT)
        for _ in range(2):
            (refused,) = world.tell(1, shards=(other, world.shard(1, 2))).refused
            assert (refused.reason, refused.step, refused.worker) == (Refusal.CONFLICT, 1, 1)
        world.hold(2, ranks=(0,))
        await is_local(world, 2)


async def test_a_report_of_a_pruned_step_does_not_bring_it_back(tmp_path: Path) -> None:
    members = Members()
    async with CoordinatorWorld(tmp_path, members, POLICY) as world:
        world.coordinator.start()
        for step in (1, 2, 3):
            world.hold(step, replicated=True)
            await until(
                lambda step=step: world.coordinator.levels()[Level.REPLICATED] == step,
                f"step {step} is replicated",
            )
        await until(lambda: members.dropped == {1}, "the plan drops step 1")
        world.hold(1)
        state = await world.coordinator.state(0, 0.0, 0.0, acknowledges=False)
        assert state.committed == (2, 3)


async def test_no_step_is_given_up_before_the_own_manifests_are_listed(tmp_path: Path) -> None:
    """Rank 2 has saved step 2 and has no shard of step 1, which may be committed, with a copy elsewhere."""
    members = Members()
    async with CoordinatorWorld(tmp_path, members, POLICY, workers=3) as world:
        world.coordinator.start()
        world.hold(1, ranks=(1,))
        newest = (RankSaves(Rank(2), Step(2), (Step(2),)),)
        for _ in range(50):
            world.tell(2, saves=newest)
            await asyncio.sleep(0)
        assert members.dropped == set()
        world.tell(0)
        world.tell(2, saves=newest)
        await until(
            lambda: members.dropped == {1}, "there is no manifest of step 1: it is given up"
        )


@pytest.mark.fault("The coordinator restarts while a node has lost its shard of a committed step")
@pytest.mark.parametrize("first", [0, 1])
async def test_a_committed_step_that_a_node_has_lost_stays_and_has_no_level(
    tmp_path: Path, first: int
) -> None:
    """The order of the reports does not matter."""
    members = Members()
    async with CoordinatorWorld(tmp_path, members, POLICY) as world:
        world.coordinator.start()
        held = (world.shard(0, 1, replicated=True), world.shard(0, 2, replicated=True))
        reports: list[dict[str, Any]] = [
            {"shards": held, "manifests": (CheckpointId(Step(1), ROUND),)},
            {"shards": (world.shard(1, 2, replicated=True),)},
        ]
        for worker in (first, 1 - first):
            saves = (RankSaves(Rank(worker), Step(2)),)
            world.tell(worker, saves=saves, **reports[worker])
        await until(lambda: world.coordinator.levels()[Level.REPLICATED] == 2, "it is replicated")
        state = await world.coordinator.state(0, 0.0, 0.0, acknowledges=False)
        assert state.committed == (2,)
        assert members.dropped == set(), "retention keeps two checkpoints"
        world.hold(3, replicated=True)
        await until(lambda: members.dropped == {1}, "it is the oldest of three")


@pytest.mark.fault("A coordinator restarts while a sidecar that has restarted reads its layouts")
async def test_a_committed_step_whose_shard_is_not_listed_yet_is_not_lost(tmp_path: Path) -> None:
    async with CoordinatorWorld(tmp_path, Members(), POLICY) as world:
        world.coordinator.start()
        manifests = (CheckpointId(Step(1), ROUND),)
        world.tell(0, shards=(world.shard(0, 1),), manifests=manifests)
        world.tell(1, saves=(RankSaves(Rank(1), Step(1), (Step(1),)),), manifests=manifests)
        world.tell(1, shards=(world.shard(1, 1),))
        await is_local(world, 1)
