"""Sidecar processes that are killed in the middle of a round resume it from their disk."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.sidecar import DEADLINE_SECONDS, FakeRank, until
from tests.support.sidecar.gang import Gangs

from holdfast_core.errors import RefusedError
from holdfast_core.ids import Level, RestartRound
from holdfast_core.messages.schema import Refusal
from holdfast_core.shm.slot_file import SlotState

pytestmark = pytest.mark.integration


async def repeat_round(gang: Any, version: int, **fields: Any) -> None:
    """Send ROUND again, as the operator does when a sidecar has lost its ROUND or its address."""
    message = gang.operator.message(0, version=version, copies=gang.copies, **fields)
    await gang.operator.round_all(message)


@pytest.mark.fault("The process that commits is killed before the manifest")
@pytest.mark.fault("A rank saves its last step while its restarted sidecar waits for its ROUND")
@pytest.mark.parametrize("worker", [0, 1], ids=["the coordinator", "another member"])
async def test_a_sidecar_that_was_killed_resumes_its_round(gangs: Gangs, worker: int) -> None:
    """The sidecar is read-only until it receives ROUND again. It still reports the committed step.

    A save that comes before is then taken, and the same gang commits the next step without a restart
    of the ranks.
    """
    async with gangs(2) as gang:
        await gang.start()
        await gang.commit(1, Level.REPLICATED)
        gang.sidecars[worker].kill()
        gang.launchers[worker].close()
        await gang.relaunch(worker)
        inventory = await gang.operator.inventory(worker)
        assert (inventory.round, inventory.version) == (0, 0)
        assert [m.step for m in inventory.manifests.values()] == [1]
        rank = await gang.connect_rank(worker, 0)
        early = asyncio.ensure_future(rank.save(2, b"before its ROUND"))
        launcher = await gang.launcher(worker, last_round=0, running=0)
        await gang.operator.seal(worker, 0)  # as the operator does before it sends ROUND again
        assert not early.done()
        await repeat_round(gang, 2)
        await early
        await gang.ranks[1 - worker].save(2, b"of the other worker")
        for saved in gang.ranks.values():
            await saved.reached(2, Level.REPLICATED)
        point = await gang.point(2)
        assert point.round == 0
        assert launcher.run is None, "the ranks were not started again"
        assert launcher.ended == [], "the ranks were not ended"
        # A coordinator that has restarted learns of step 1 beside the commit of step 2.
        state = await gang.operator.state_until(
            0, lambda s: s.committed == (1, 2), "the record of both steps"
        )
        assert state.dead == ()


@pytest.mark.fault(
    "A sidecar is killed when a shard is durable and its coordinator has not been told"
)
async def test_a_shard_that_was_staged_when_the_sidecar_died_is_finished(gangs: Gangs) -> None:
    """The slot is owned and nothing is on disk.

    The restarted sidecar writes the shard, and the step is committed.
    """
    async with gangs(2) as gang:
        await gang.start()
        rank: FakeRank = gang.ranks[1]
        data = b"x" * 50_000
        await rank.save(1, data)
        gang.sidecars[1].kill()
        gang.launchers[1].close()
        name = rank.names[0]
        rank.fill_slot(name, 1, data)
        rank.own_slot(name, rank.stage_message(name, 1, data))
        for shard in gang.sidecars[1].node.rglob("*.shard"):
            shard.unlink()
        await gang.relaunch(1)
        await gang.connect_rank(1, 0)
        await gang.launcher(1, last_round=0, running=0)
        await repeat_round(gang, 2)
        await gang.ranks[0].save(1, b"y" * 1000)
        await gang.ranks[0].reached(1, Level.REPLICATED)
        await until(lambda: rank.header(name).state is SlotState.FREE, "the slot is free")


@pytest.mark.fault("A sidecar is killed while its ranks restore, and its peer is away meanwhile")
async def test_a_rank_waits_for_a_sidecar_that_restarts_during_its_restore(gangs: Gangs) -> None:
    """A refusal would end the rank, and its gang would begin another round that counts as a failure."""
    async with gangs(2) as gang:
        await gang.start()
        saved = await gang.commit(1, Level.REPLICATED)
        point = await gang.point(1)
        for worker in range(2):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=point)
        for worker in range(2):
            gang.sidecars[worker].kill()
            gang.launchers[worker].close()
        for shard in gang.sidecars[1].node.rglob("rank000001-*.shard"):
            shard.unlink()
        await gang.relaunch(1)
        rank = await gang.connect_rank(1, 1)
        restored = asyncio.ensure_future(rank.restore())
        await gang.launcher(1, last_round=1, running=1)
        message = gang.operator.message(1, version=2, copies=gang.copies, restore=point)
        await gang.operator.round(1, message)
        await gang.relaunch(0)
        assert not restored.done(), (
            "its shard is at worker 0 alone, which does not know the round yet"
        )
        again = gang.operator.message(1, version=3, copies=gang.copies, restore=point)
        await gang.operator.round_all(again)
        assert (await restored)[1] == saved[1]


@pytest.mark.fault(
    "A sidecar is killed, and its launcher says that all ranks returned before the next SEAL"
)
@pytest.mark.parametrize("worker", [0, 1], ids=["the coordinator", "another member"])
async def test_ranks_that_returned_before_a_restart_finish(gangs: Gangs, worker: int) -> None:
    """The SEAL discards what the launcher has said, and ROUND makes it say it again."""
    async with gangs(2) as gang:
        await gang.start()
        await gang.commit(1, Level.REPLICATED)
        for rank in gang.ranks.values():
            rank.close()
        gang.sidecars[worker].kill()
        gang.launchers[worker].close()
        await gang.relaunch(worker)
        await gang.launcher(worker, last_round=0, running=0)
        waiting = [asyncio.create_task(launcher.finish()) for launcher in gang.launchers.values()]
        await gang.operator.seal(worker, 0)
        await repeat_round(gang, 2)
        state = await gang.operator.state_until(0, lambda s: s.finished, "finished")
        await gang.operator.state(0, since=state.version)
        await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_SECONDS)


async def test_the_coordinator_may_be_renamed_within_a_round(gangs: Gangs) -> None:
    """A higher version names worker 1, which then has a record of committed steps and commits new ones."""
    async with gangs(2) as gang:
        await gang.start()
        await gang.commit(1, Level.REPLICATED)
        await repeat_round(gang, 2, coordinator=1)
        await gang.commit(2, Level.REPLICATED)
        await gang.replicated(1, {1, 2})
        with pytest.raises(RefusedError) as refused:
            await gang.operator.state(0)
        assert refused.value.code == Refusal.NOT_COORDINATOR


async def test_a_full_node_volume_fails_the_save_and_nothing_else(gangs: Gangs) -> None:
    async with gangs(1) as gang:
        gang.node_capacity_bytes = 300_000
        await gang.start()
        await gang.commit(1, Level.LOCAL)
        rank = gang.ranks[0]
        await rank.save(2, bytes(400_000))
        await until(
            lambda: [m.reason for m in rank.failures] == ["NodeVolumeFull"],
            "the save failed",
        )
        await gang.operator.state_until(
            0,
            lambda s: [(f.tier, f.reason) for f in s.failures] == [("node", "NodeVolumeFull")],
            "the failure is shown",
        )
        await gang.commit(3, Level.LOCAL)
        await gang.operator.state_until(0, lambda s: not s.failures, "healthy again")


async def test_a_round_is_remembered_over_a_restart(gangs: Gangs) -> None:
    """A sidecar that was sealed for round 4 and killed is still in round 4 after its restart.

    Its pod began in round 0.
    """
    async with gangs(1) as gang:
        await gang.start()
        await gang.operator.seal(0, 4)
        gang.sidecars[0].kill()
        await gang.relaunch(0)
        assert (await gang.operator.inventory(0)).round == RestartRound(4)
