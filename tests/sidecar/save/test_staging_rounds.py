"""Slots of a sidecar at a SEAL and after its restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.gated_stager import FREE, LAYOUT, RANK, ROUND, running

from holdfast_core.ids import RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardHeader


@pytest.mark.fault("The sidecar dies while steps wait in slots, and the SEAL comes before a ROUND")
@pytest.mark.parametrize("dies", [False, True], ids=["same process", "another process"])
async def test_a_seal_writes_all_that_was_handed_over_and_nothing_else(
    tmp_path: Path, dies: bool
) -> None:
    async with running(tmp_path, 4) as world:
        for index, step in ((0, 1), (1, 2), (2, 3)):
            await world.save(index, step)
        world.fill(3, 4)  # the rank dies before it hands this slot over
        world.stager.seal()
        world.stager.choose(Step(2))
        world.node.let(1, 2, 3, 4)
        assert await world.stager.settle(HANG_SECONDS)
        assert world.node.begun == [1], "nothing is begun any more"
        if dies:
            world.stager = world.process()  # the new process has received no ROUND
        for _ in range(2):  # a SEAL may be repeated
            assert await world.stager.write_waiting(HANG_SECONDS)
            assert world.node.begun == [1, 2, 3]
        assert world.stored() == [1, 2, 3]
        assert {r.header.world_size for r in world.node.list_shards()} == {2}
        world.stager.recover(replace(world.state, round=RestartRound(1)))
        assert world.slots() == [FREE, FREE, FREE, FREE]


async def test_a_seal_reports_that_its_time_ran_out(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        world.node.let(1)
        world.stager.seal()
        assert await world.stager.settle(HANG_SECONDS)
        assert not await world.stager.write_waiting(0)
        world.node.let(2)
        assert await world.stager.settle(HANG_SECONDS), "the next SEAL finds it written"
        assert world.stored() == [1, 2]


async def test_a_restarted_sidecar_recovers_slots_that_waited_or_were_being_written(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        old = world.stager
        world.life()
        assert world.stager.waiting(RANK) == (1, 2)
        assert not world.stager.writes(RANK)
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(lambda: world.stored() == [1, 2])
        await world.until(lambda: world.stager.waiting(RANK) == (1,))
        assert await old.settle(HANG_SECONDS)


async def test_a_late_write_of_an_older_round_does_not_count_in_the_new_one(tmp_path: Path) -> None:
    """The new round trains that step again with other bytes, which the coordinator would refuse."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        world.stager.choose(Step(2))
        world.node.let(1)
        await world.until(lambda: world.stager.waiting(RANK) == ())
        world.stager.seal()
        world.state = replace(world.state, round=RestartRound(1))
        world.stager.recover(world.state)
        assert world.stager.writes(RANK)
        assert world.stager.under_way(RANK) == ()
        world.node.let(2)
        await world.until(lambda: world.stored() == [1, 2] and world.slots() == [FREE] * 3)
        assert world.stager.idle


async def test_a_shard_that_an_earlier_process_had_written_frees_its_slot(tmp_path: Path) -> None:
    """The earlier process died before it freed the slot. A step that is on the nodes is not chosen again."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        header = ShardHeader(CONTRACT.job_uid, ROUND, Step(1), RANK, 2, LAYOUT, 1000)
        record = DiskNodeTier.write_shard(world.node, header, BytesSource(bytes([1]) * 1000))
        old, world.stager = world.stager, world.process()
        world.stager.recover(world.state, frozenset({(RANK, Step(1))}))
        assert world.stager.waiting(RANK) == ()
        world.node.let(1)
        await world.until(lambda: world.slots() == [FREE] * 3)
        assert record in [o.record for o in world.outcomes]
        assert await old.settle(HANG_SECONDS)
        assert await world.stager.settle(HANG_SECONDS)
        assert world.stager.idle


@pytest.mark.fault(
    "The plan reaches a sidecar that has restarted before it has begun its round again"
)
async def test_a_step_that_was_chosen_before_the_slots_are_taken_over_is_written(
    tmp_path: Path,
) -> None:
    """The plan names it once. After the last step of a training no other plan follows."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        old, world.stager = world.stager, world.process()
        world.stager.choose(Step(2))
        world.stager.recover(world.state)
        assert world.stager.writes(RANK)
        assert world.stager.waiting(RANK) == (1,)
        world.node.let(1, 2)
        assert await old.settle(HANG_SECONDS)


@pytest.mark.fault(
    "Ranks hand slots over to a sidecar that has restarted before it has begun its round"
)
async def test_what_was_staged_before_the_slots_are_taken_over_is_reported(tmp_path: Path) -> None:
    """The coordinator would not know that the rank waits, and never let it write its last steps."""
    async with running(tmp_path, 3) as world:
        world.stager = world.process()
        await world.save(0, 1)
        await world.save(1, 2)
        world.stager.recover(world.state)
        assert (world.stager.newest(RANK), world.stager.waiting(RANK)) == (2, (2,))
        world.stager.seal()
        world.stager.recover(replace(world.state, round=RestartRound(1)))
        assert world.stager.newest(RANK) is None, "in another round"
