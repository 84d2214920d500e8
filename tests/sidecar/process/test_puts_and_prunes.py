"""Which shards a member needs before it accepts a manifest, and what it deletes when it is told to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.shards.builders import BytesSource, manifest, shard_file, shard_header
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import first_round

from holdfast_core.errors import NotFoundError
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.messages.schema import ManifestPut, Ok, Plan
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.save.staging import Room
from holdfast_core.tasks import Signal
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.gang.state import RankNotices
from holdfast_sidecar.process.control import ManifestRequests, Pruner
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.wire.intake import LocalConnections

DATA = b"x" * 1000
HEADER = shard_header(len(DATA), job_uid=CONTRACT.job_uid, world_size=2)
_, RECORD = shard_file(HEADER, DATA)
CHECKPOINT = (HEADER.step, HEADER.round)


class PlayedStager:
    """A stager without slots."""

    def __init__(self) -> None:
        self.slot_writes = SimpleNamespace(room=Room())
        self.changed = Signal[[]]()
        self.waits: tuple[Step, ...] = ()
        self.forgotten: list[frozenset[Step]] = []

    def waiting(self, rank: Rank) -> tuple[Step, ...]:
        return self.waits

    def choose(self, step: Step | None) -> None:
        return

    def forget(self, steps: frozenset[Step]) -> None:
        self.waits = tuple(step for step in self.waits if step not in steps)
        self.forgotten.append(steps)
        self.changed()


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
                dropped=frozenset({Step(5)}),
            ),
        )
        no_peers: Any = None
        self.manifests = ManifestRequests(pod, tiers, saves, failures)
        notices = RankNotices(self.current, LocalConnections())
        self.copies = IncomingCopies(pod, tiers, no_peers)
        self.pruner = Pruner(pod, tiers, saves, self.copies, notices, failures)

    async def put(self) -> Ok:
        """Put a manifest of this shard and of a shard of rank 1, as the coordinator does."""
        other = replace(RECORD, header=replace(RECORD.header, rank=Rank(1)))
        text = manifest([RECORD, other]).to_bytes().decode()
        return await self.manifests.put(ManifestPut(HEADER.round, HEADER.step, text))

    async def close(self) -> None:
        await self.pruner.close()
        self.pools.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_manifest_without_its_shard_is_refused(world: World) -> None:
    with pytest.raises(NotFoundError, match="rank 0"):
        await world.put()
    assert world.node.list_manifests() == ()
    await world.close()


async def test_copies_begin_when_the_manifest_is_there(world: World) -> None:
    world.node.write_shard(HEADER, BytesSource(DATA))
    assert await world.put() == Ok(HEADER.round)
    assert world.copied == [CHECKPOINT]
    await world.close()


@pytest.mark.fault("A rank goes back and saves a step again that was dropped")
async def test_a_dropped_step_that_is_saved_again_does_not_keep_its_slot(world: World) -> None:
    world.stager.waits = (Step(5), Step(6))
    world.stager.changed()
    await asyncio.sleep(0)
    assert world.stager.forgotten == [{5}]
    assert world.stager.waits == (6,)
    await world.close()


async def test_a_prune_deletes_nothing_after_a_seal(world: World) -> None:
    """The inventory that answers the seal lists the shard, and the next round may start from it."""
    world.node.write_shard(HEADER, BytesSource(DATA))
    world.pruner.take(Plan(HEADER.round, drop=(HEADER.step,)))
    world.current.state = world.current.state.sealed_for(RestartRound(1))
    await asyncio.sleep(0)
    await world.pools.meta.run(len, ())
    await asyncio.sleep(0)
    await world.pools.shard.run(len, ())
    assert len(world.node.list_shards()) == 1
    await world.close()
