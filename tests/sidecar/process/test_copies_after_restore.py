"""Copies of the restore point are made again when the ranks have finished a step (ADR 0018)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB_UID, shard_header
from tests.support.sidecar.lifecycle_bed import SlowNode, World

from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Rank, RestartRound, ShardRef, Step, TierName
from holdfast_core.messages.schema import Progress, RestorePoint
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardRecord
from holdfast_sidecar.restore.rehydrate import Restored

RECORD = ShardRecord(
    shard_header(100, round=3, step=10, world_size=1), digest_of(b"a"), digest_of(b"b"), 4096
)
POINT = RestorePoint(Step(10), RestartRound(3), digest_of(b"manifest"))
RESTORED = Restored(POINT, None, {Rank(0): RECORD.ref}, {Rank(0): 100}, {Rank(0): TierName.NODE})


@asynccontextmanager
async def restored(folder: Path) -> AsyncIterator[World]:
    """Yield a sidecar in round 4 whose restore point, step 10 of round 3, has just arrived."""
    tier = DiskNodeTier(folder, capacity_bytes=1 << 30)
    tier.open()
    node = SlowNode(tier)
    node.find = lambda ref: RECORD if ref == RECORD.ref else None
    world = World(node, folder, job_uid=JOB_UID)
    world.gang.running_round = RestartRound(4)
    world.rehydrator.restored = RESTORED
    world.progressed()
    await until_asleep(world)
    try:
        yield world
    finally:
        await world.lifecycle.close()
        world.pools.close()


async def until_asleep(world: World) -> None:
    """Let the tasks run until they wait for the clock or have ended."""
    for _ in range(50):
        await asyncio.sleep(0.001)
        if world.clock.sleepers:
            return


async def looks(world: World, seconds: float) -> None:
    world.clock.advance(seconds)
    await until_asleep(world)


async def copied(world: World) -> int:
    async with asyncio.timeout(HANG_SECONDS):
        while not world.copied:  # noqa: ASYNC110 - a thread of a pool
            await asyncio.sleep(0.001)
    return len(world.copied)


async def test_ranks_start_before_anything_is_copied(tmp_path: Path) -> None:
    async with restored(tmp_path) as world:
        assert world.evaluated == [True]
        await looks(world, 5.0)
        assert world.copied == []


async def test_the_first_step_of_the_ranks_starts_the_copies(tmp_path: Path) -> None:
    async with restored(tmp_path) as world:
        world.gang.progressed(Progress(RestartRound(4), Rank(0), Step(11)))
        world.clock.advance(0.2)
        assert await copied(world) == 1
        (shard,) = world.copied
        assert (shard.ref, shard.committed, shard.reported) == (RECORD.ref, True, False)


async def test_copies_wait_ten_seconds_at_most(tmp_path: Path) -> None:
    async with restored(tmp_path) as world:
        await looks(world, 9.9)
        assert world.copied == []
        world.clock.advance(0.2)
        assert await copied(world) == 1


@pytest.mark.fault("A round is sealed while a disk finds the restore point that is to be copied")
async def test_a_shard_that_is_found_after_a_seal_is_not_copied(tmp_path: Path) -> None:
    """The table of the next round would have the restore point of this one."""
    finding, go_on = threading.Event(), threading.Event()

    def find(_: ShardRef) -> ShardRecord:
        finding.set()
        assert go_on.wait(HANG_SECONDS)
        return RECORD

    async with restored(tmp_path) as world:
        world.node.find = find
        world.clock.advance(10.0)
        assert await asyncio.to_thread(finding.wait, HANG_SECONDS)
        world.rehydrator.restored = None  # as the reset of a seal does
        go_on.set()
        await world.pools.read.drain(HANG_SECONDS)
        await until_asleep(world)
        assert world.copied == []


async def test_a_seal_ends_the_wait(tmp_path: Path) -> None:
    async with restored(tmp_path) as world:
        world.rehydrator.restored = None  # as the reset of a seal does
        await looks(world, 60.0)
        assert world.copied == []
        assert world.clock.sleepers == 0
