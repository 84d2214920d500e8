"""Which shards a member needs before it accepts a manifest, and what it deletes when it receives notices."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.shards.builders import BytesSource, manifest, shard_file, shard_header
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import first_round

from holdfast_core.errors import NotFoundError, RefusedError
from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import BufferNotice, LevelNotice, ManifestPut, Ok, Refusal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.record import ShardRecord
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.signals import Signal
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.gang.notices import RankNotices
from holdfast_sidecar.process.manifests import ManifestRequests
from holdfast_sidecar.process.pruning import Pruner
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.save.room import Room
from holdfast_sidecar.wire.intake import LocalConnections

DATA = b"x" * 1000
HEADER = shard_header(len(DATA), job_uid=CONTRACT.job_uid, world_size=2)
_, RECORD = shard_file(HEADER, DATA)
CHECKPOINT = (HEADER.step, HEADER.round)


class PlayedStager:
    """A stager whose shards in memory are set by the test."""

    def __init__(self) -> None:
        self.in_memory: ShardRecord | None = None
        self.digesting = False
        self.commits: list[tuple[Step, RestartRound]] = []
        self.dropped: frozenset[Step] = frozenset()
        self.chosen: Step | None = None
        self.room = Room()

    def find(self, rank: Rank, checkpoint: CheckpointId) -> ShardRecord | None:
        return self.in_memory

    def may_find(self, rank: Rank, checkpoint: CheckpointId) -> bool:
        return self.digesting

    def committed(self, step: Step, round_: RestartRound) -> None:
        self.commits.append((step, round_))

    def choose(self, step: Step | None) -> None:
        self.chosen = step

    def forget(self, steps: frozenset[Step]) -> None:
        return

    def release(self, steps: frozenset[Step]) -> None:
        return


class World:
    """Worker 0, with stand-ins for its slots and for its table of shards."""

    def __init__(self, root: Path) -> None:
        self.node = DiskNodeTier(root, capacity_bytes=1 << 30)
        self.node.open()
        self.pools = Pools(disk=1, fetch=1, store=1)
        self.stager = PlayedStager()
        self.copied: list[tuple[Step, RestartRound]] = []
        self.current = CurrentRound(first_round())
        pod = Pod(Settings(CONTRACT), ManualClock(), self.current)
        tiers = Tiers(self.node, None, self.pools)
        failures = Failures(lambda: None)
        saves: Any = SimpleNamespace(
            stager=self.stager,
            flow=SimpleNamespace(
                committed=lambda step, round_: self.copied.append((step, round_)),
                forget=lambda steps: None,
            ),
            dropped=Signal(),
        )
        no_peers: Any = None
        self.manifests = ManifestRequests(pod, tiers, saves, no_peers, failures)
        notices = RankNotices(self.current, LocalConnections())
        self.copies = IncomingCopies(pod, tiers, no_peers)
        self.pruner = Pruner(pod, tiers, saves, self.copies, notices, failures)

    async def put(self, *, buffered: bool) -> Ok:
        """Put a manifest of this shard and of a shard of rank 1, as the coordinator does."""
        other = replace(RECORD, header=replace(RECORD.header, rank=Rank(1)))
        text = manifest([RECORD, other]).to_bytes().decode()
        return await self.manifests.put(
            ManifestPut(HEADER.round, HEADER.step, text, buffered=buffered)
        )

    async def close(self) -> None:
        await self.pruner.close()
        self.pools.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_shard_in_memory_is_acknowledged_when_the_manifest_allows_it(world: World) -> None:
    world.stager.in_memory = RECORD
    assert await world.put(buffered=True) == Ok(HEADER.round)
    assert len(world.node.list_manifests()) == 1
    assert world.stager.commits == [CHECKPOINT]
    assert world.copied == [], "copies wait until the step is local"
    await world.close()


@pytest.mark.parametrize(
    ("buffered", "in_memory"), [(False, True), (True, False)], ids=["not allowed", "not there"]
)
async def test_a_manifest_without_its_shard_is_refused(
    world: World, buffered: bool, in_memory: bool
) -> None:
    world.stager.in_memory = RECORD if in_memory else None
    with pytest.raises(NotFoundError, match="rank 0"):
        await world.put(buffered=buffered)
    assert world.node.list_manifests() == ()
    await world.close()


async def test_a_shard_that_is_digested_again_is_busy_and_not_lost(world: World) -> None:
    world.stager.digesting = True
    with pytest.raises(RefusedError) as refused:
        await world.put(buffered=True)
    assert refused.value.code is Refusal.BUSY
    await world.close()


async def test_copies_begin_at_once_when_every_shard_is_durable(world: World) -> None:
    world.node.write_shard(HEADER, BytesSource(DATA))
    await world.put(buffered=False)
    assert world.copied == [CHECKPOINT]
    await world.close()


async def test_copies_of_a_step_that_waited_begin_when_it_is_local(world: World) -> None:
    world.pruner.level(LevelNotice(HEADER.round, *CHECKPOINT, Level.LOCAL))
    assert world.copied == [CHECKPOINT]
    await world.close()


async def test_a_prune_deletes_nothing_after_a_seal(world: World) -> None:
    """The inventory that answers the seal lists the shard, and the next round may start from it."""
    world.node.write_shard(HEADER, BytesSource(DATA))
    in_memory = Step(HEADER.step + 1)
    world.stager.dropped = frozenset({in_memory})
    sealed = threading.Event()
    busy = asyncio.ensure_future(world.pools.meta.run(sealed.wait, 30))
    await asyncio.sleep(0)
    world.pruner.apply_notice(BufferNotice(HEADER.round, prune=(HEADER.step, in_memory)))
    await asyncio.sleep(0)
    world.current.state = world.current.state.sealed_for(RestartRound(1))
    sealed.set()
    await busy
    await world.pools.meta.run(len, ())
    await asyncio.sleep(0)
    await world.pools.shard.run(len, ())
    assert len(world.node.list_shards()) == 1
    await world.close()
