"""Manifests are built in a thread. Until one is built, its step may be completed, given up or lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.sidecar.coordinators import CoordinatorWorld
from tests.support.sidecar.ledgers import shard_info
from tests.support.sidecar.ranks import rank_document
from tests.support.sidecar.waiting import until

from holdfast_core.errors import UnavailableError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    Buffered,
    DigestedShard,
    ManifestPut,
    Ok,
    Policy,
    Prepared,
    RankBuffered,
)

ROUND = RestartRound(0)
STEP = Step(1)


class Members:
    """Two members that accept everything and have no inventory."""

    def __init__(self) -> None:
        self.manifests: list[tuple[Worker, Step]] = []

    async def call(self, worker: Worker, message: Any, reply: type[Any], **_: Any) -> Ok:
        if isinstance(message, ManifestPut):
            self.manifests.append((worker, message.step))
        return Ok(ROUND, "a")

    async def get(self, worker: Worker, path: str, reply: type[Any], **_: Any) -> Any:
        raise UnavailableError(f"GET {path} to worker {worker}: it is away")


class World(CoordinatorWorld):
    """A coordinator whose threads are occupied until `go_on` is set."""

    def __init__(self, folder: Path) -> None:
        self.members = Members()
        super().__init__(folder, self.members, Policy(interval_steps=1, slots=3))
        self.go_on = threading.Event()
        self._occupied = [
            asyncio.create_task(self.pools.read.run(self.go_on.wait)) for _ in range(8)
        ]
        self.coordinator.start()

    def prepare(self, step: int) -> None:
        """Let both ranks prepare the step."""
        for rank in (0, 1):
            document = rank_document(rank, shard_info(rank).payload_bytes)
            layout = layout_digests(document)
            self.coordinator.prepared(
                Prepared(ROUND, Step(step), Worker(rank), shard_info(rank), layout)
            )

    def buffer(self, rank: int, *steps: int) -> None:
        """Let a rank report the steps that it buffers now."""
        document = rank_document(rank, shard_info(rank).payload_bytes)
        digest = digest_of(document)
        shards = tuple(DigestedShard(Step(s), shard_info(rank), digest) for s in steps)
        buffered = (RankBuffered(Rank(rank), shards),)
        self.coordinator.buffered(
            Buffered(ROUND, Worker(rank), buffered, (layout_digests(document),))
        )


@asynccontextmanager
async def world_in(folder: Path) -> AsyncIterator[World]:
    async with World(folder) as world:
        try:
            yield world
        finally:
            world.go_on.set()


async def test_a_step_is_local_when_its_manifest_was_built_late(tmp_path: Path) -> None:
    async with world_in(tmp_path) as world:
        world.prepare(1)
        world.prepare(1)
        assert world.coordinator.levels()[Level.LOCAL] is None
        world.go_on.set()
        await until(lambda: world.coordinator.levels()[Level.LOCAL] == 1, "step 1 is local")
        assert sorted(world.members.manifests) == [(0, 1), (1, 1)], "one manifest for each member"


async def test_a_step_that_is_lost_before_its_manifest_is_built_reaches_no_member(
    tmp_path: Path,
) -> None:
    async with world_in(tmp_path) as world:
        for rank in (0, 1):
            world.buffer(rank, 1)
        world.buffer(1)
        world.go_on.set()
        world.prepare(2)
        await until(lambda: world.coordinator.levels()[Level.LOCAL] == 2, "step 2 is local")
        assert {step for _, step in world.members.manifests} == {2}
