"""A stager over real slots, and a node tier that writes a shard when the test lets it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.ranks import rank_document
from tests.support.sidecar.rounds import first_round
from tests.support.sidecar.stagers import stager_of

from holdfast_core.errors import UnavailableError
from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.messages.schema import Stage
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.save.staging import Stager, WriteOutcome
from holdfast_core.shards.file import ShardHeader, ShardRecord
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotFile, SlotHeader, SlotState, slot_name
from holdfast_core.tiers.base import PayloadSource
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures, Metrics
from holdfast_sidecar.base.tiers import Pools

RANK, ROUND = Rank(0), RestartRound(0)
_LAYOUT = rank_document(RANK, 1000)
LAYOUT = digest_of(_LAYOUT)
CAPACITY = 1 << 16


class GatedTier(DiskNodeTier):
    """A tier that writes a shard when the test lets its step continue."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, capacity_bytes=1 << 30)
        self.begun: list[int] = []
        self.fails: set[int] = set()
        self._open: set[int] = set()
        self._changed = threading.Condition()

    def let(self, *steps: int) -> None:
        with self._changed:
            self._open.update(steps)
            self._changed.notify_all()

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        self.begun.append(header.step)
        with self._changed:
            assert self._changed.wait_for(lambda: header.step in self._open, HANG_SECONDS)
        if header.step in self.fails:
            raise UnavailableError(f"step {header.step}: the disk fails")
        return super().write_shard(header, source)


class World:
    """A stager over real slots and a real, gated node tier."""

    def __init__(self, root: Path, slots: int) -> None:
        self.settings = Settings(replace(CONTRACT, shared_dir=str(root / "shared")))
        self.settings.slots_dir.mkdir(parents=True)
        self.settings.layouts_dir.mkdir()
        (self.settings.layouts_dir / f"{hex_of(LAYOUT)}.json").write_bytes(_LAYOUT)
        for index in range(slots):
            self.create(index)
        self.node = GatedTier(root / "node")
        self.node.open()
        self.pools = Pools(disk=2, fetch=1, store=1)
        self.metrics = Metrics()
        self.outcomes: list[WriteOutcome] = []
        self.deaths: list[object] = []
        self._changed = asyncio.Event()
        state = first_round()
        assert state.accepted is not None
        policy = replace(state.accepted.policy, slots=slots)
        self.state: RoundState = replace(state, accepted=replace(state.accepted, policy=policy))
        self.stager = self.life()

    def create(self, index: int) -> None:
        """Create the file of a slot, in place of an earlier one, as the rank does."""
        path = self.settings.slots_dir / slot_name(RANK, index)
        path.unlink(missing_ok=True)
        path.write_bytes(SlotHeader(SlotState.FREE, RANK, CAPACITY).pack())
        os.truncate(path, HEADER_BYTES + CAPACITY)

    def life(self) -> Stager:
        """Start another sidecar process over the same slots and the same disk, in the same round."""
        self.stager = self.process()
        self.stager.recover(self.state)
        return self.stager

    def process(self) -> Stager:
        """Start another sidecar process that has received no ROUND."""
        stager = stager_of(
            self.settings, self.state, self.node, self.pools, Failures(lambda: None), self.metrics
        )
        stager.ended.subscribe(self.note)
        stager.changed.subscribe(self._changed.set)
        return stager

    def note(self, outcome: WriteOutcome) -> None:
        self.outcomes.append(outcome)
        self._changed.set()

    def died(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Record the exception that ended a task. It is set as the loop's exception handler."""
        self.deaths.append(context)
        self._changed.set()

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        lines = self.metrics.render().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def fill(self, index: int, step: int, data: bytes | None = None) -> Stage:
        """Fill a slot as the rank does. Return the message that hands it over."""
        data = data or bytes([step]) * 1000
        name = slot_name(RANK, index)
        slot = SlotFile.open(self.settings.slots_dir, name)
        assert slot.header().state is SlotState.FREE
        slot.write_payload(0, memoryview(data))
        slot.write_header(SlotHeader(SlotState.FULL, RANK, CAPACITY, ROUND, Step(step), len(data)))
        slot.close()
        return Stage(ROUND, Step(step), RANK, name, len(data), LAYOUT)

    async def save(self, index: int, step: int, data: bytes | None = None) -> None:
        """Fill a slot and hand it over, as the rank does."""
        await self.stager.stage(lambda: self.state, self.fill(index, step, data))

    def clear(self, index: int) -> None:
        """Free the slot, as the rank does after a refusal."""
        slot = SlotFile.open(self.settings.slots_dir, slot_name(RANK, index))
        slot.set_state(SlotState.FREE)
        slot.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), HANG_SECONDS)

    def slots(self) -> list[SlotState]:
        states = []
        for path in sorted(self.settings.slots_dir.iterdir()):
            slot = SlotFile.open(self.settings.slots_dir, path.name)
            states.append(slot.header().state)
            slot.close()
        return states

    def stored(self) -> list[int]:
        return sorted(record.header.step for record in self.node.list_shards())


@asynccontextmanager
async def running(root: Path, slots: int) -> AsyncIterator[World]:
    world = World(root, slots)
    try:
        yield world
    finally:
        world.node.let(*range(100))
        assert await world.stager.settle(HANG_SECONDS)
        world.pools.close()


FREE, OWNED = SlotState.FREE, SlotState.OWNED
