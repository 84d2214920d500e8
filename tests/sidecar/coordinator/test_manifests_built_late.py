"""Manifests are built in a thread. Until one is built, its step may be completed, given up or lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.sidecar.coordinators import CoordinatorWorld
from tests.support.sidecar.waiting import until

from holdfast_core.ids import Level, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    Ok,
    Plan,
    Policy,
)

ROUND = RestartRound(0)
STEP = Step(1)


class Members:
    """Two members that accept everything."""

    def __init__(self) -> None:
        self.manifests: set[tuple[Worker, Step]] = set()

    async def call(self, worker: Worker, message: Any, reply: type[Any], **_: Any) -> Ok:
        if isinstance(message, Plan):
            self.manifests |= {(worker, checkpoint.step) for checkpoint, _ in message.manifests}
        return Ok(ROUND)


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
        self.hold(step)


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
        assert world.members.manifests == {(0, 1), (1, 1)}
