"""Slots of a sidecar at a SEAL, after its restart, and with another coordinator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.shards.builders import BytesSource, manifest
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.gated_stager import (
    FREE,
    LAYOUT,
    OWNED,
    RANK,
    ROUND,
    running,
)

from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.record import ShardHeader


@pytest.mark.parametrize("dies", [False, True], ids=["same process", "another process"])
async def test_a_seal_writes_what_is_committed_and_nothing_else(tmp_path: Path, dies: bool) -> None:
    async with running(tmp_path, 4) as world:
        await world.save(0, 1)
        for index, step in ((1, 2), (2, 3), (3, 4)):
            await world.save(index, step)
        await world.digested(2, 3, 4)
        world.stager.seal()
        world.stager.choose(Step(2))
        world.node.let(1, 2, 3, 4)
        assert await world.stager.settle(120)
        assert world.node.begun == [1], "nothing is begun any more"
        manifests = frozenset(CheckpointId(Step(s), ROUND) for s in (2, 3))
        for checkpoint in manifests:
            record = world.stager.find(RANK, checkpoint)
            assert record is not None
            other = replace(record, header=replace(record.header, rank=Rank(1)))
            document = manifest([record, other]).to_bytes()
            world.node.put_manifest(CONTRACT.job_uid, checkpoint, document)
        if dies:
            world.stager = world.process()  # the new process has received no ROUND
        assert await world.stager.write_buffered(manifests, 30)
        assert world.node.begun == [1, 2, 3]
        assert world.stored() == [1, 2, 3]
        assert world.slots() == [FREE, FREE, FREE, OWNED]
        world.stager.recover(replace(world.state, round=RestartRound(1)))
        assert world.slots() == [FREE, FREE, FREE, FREE]


async def test_a_seal_reports_that_its_time_ran_out(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        world.node.let(1)
        world.stager.seal()
        assert await world.stager.settle(120)
        manifests = frozenset({CheckpointId(Step(2), ROUND)})
        assert not await world.stager.write_buffered(manifests, 0)
        world.node.let(2)
        assert await world.stager.settle(120), "the next SEAL finds it written"
        assert world.stored() == [1, 2]


async def test_a_restarted_sidecar_recovers_slots_in_memory_and_being_written(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        before = world.buffered().shards
        old = world.stager
        world.life()
        assert world.buffered().digesting == (1, 2), "their digests are being computed"
        assert world.stager.may_find(RANK, CheckpointId(Step(2), ROUND))
        assert not world.stager.may_find(RANK, CheckpointId(Step(3), ROUND))
        await world.digested(1, 2)
        assert world.buffered().shards[1:] == before
        assert not world.stager.may_find(RANK, CheckpointId(Step(2), ROUND))
        assert world.buffered().writing is None
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(lambda: world.buffered().shards[-1].stored)
        assert await old.settle(120)


async def test_another_coordinator_receives_everything_again(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        world.stager.mark_reported(world.stager.buffered())
        assert world.stager.unreported is None
        world.stager.coordinator_changed()
        assert world.stager.unreported is not None
        assert not world.stager.has_coordinator
        world.stager.coordinator_replied()
        assert world.stager.has_coordinator
        world.node.let(1)


async def test_a_late_write_of_an_older_round_does_not_count_in_the_new_one(tmp_path: Path) -> None:
    """The new round trains that step again with other bytes, which the coordinator would refuse."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        world.stager.choose(Step(2))
        world.node.let(1)
        await world.until(lambda: world.buffered().writing == 2)
        world.stager.mark_reported(world.stager.buffered())
        world.stager.seal()
        world.state = replace(world.state, round=RestartRound(1))
        world.stager.recover(world.state)
        world.stager.coordinator_replied()
        assert world.buffered().shards == (), "being written"
        assert world.stager.find(RANK, CheckpointId(Step(2), RestartRound(1))) is None
        world.node.let(2)
        await world.until(lambda: world.stored() == [1, 2] and world.slots() == [FREE] * 3)
        assert world.buffered().shards == (), "written"
        assert world.stager.unreported is None


async def test_a_shard_that_an_earlier_process_had_written_frees_its_slot(tmp_path: Path) -> None:
    """The earlier process died before it freed the slot. A step that is on the nodes is not chosen again."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        header = ShardHeader(CONTRACT.job_uid, ROUND, Step(1), RANK, 2, LAYOUT, 1000)
        record = DiskNodeTier.write_shard(world.node, header, BytesSource(bytes([1]) * 1000))
        world.life()
        await world.until(lambda: world.slots() == [FREE] * 3)
        assert [(s.step, s.stored) for s in world.buffered().shards] == [(1, True)]
        assert [o.record for o in world.outcomes] == [record]
        world.stager.mark_reported(world.stager.buffered())
        assert world.stager.idle
