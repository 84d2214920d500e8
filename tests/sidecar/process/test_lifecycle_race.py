"""A SEAL that arrives while a ROUND of the old round is being recorded takes precedence.

Pools, fencing state and node tier are real. Stand-ins replace the tasks that a seal stops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import round_message

from holdfast_core.errors import StaleRoundError
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import Round, Seal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing.background_limit import BackgroundLimit
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import OPERATOR, RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.signals import Signal
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.process.journeys import Journeys
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.save.layouts import RankLayouts


class SlowNode:
    """A node tier whose writes of the round file wait until the test sets `go_on`."""

    def __init__(self, tier: DiskNodeTier) -> None:
        self._tier = tier
        self.writing = threading.Event()
        self.go_on = threading.Event()
        self.list_shards: Callable[[], Any] = tier.list_shards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def write_round(self, round_: RestartRound, version: int) -> None:
        self.writing.set()
        assert self.go_on.wait(120)
        self._tier.write_round(round_, version)


class PlayedStager:
    """A stager that records how long a seal waits for the writes of slots."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.settle_seconds: list[float] = []
        self.write_seconds: list[float] = []
        self.wait: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)

    def seal(self) -> None:
        return

    async def settle(self, seconds: float) -> bool:
        self.settle_seconds.append(seconds)
        await self.wait()
        return True

    async def write_buffered(self, manifests: object, seconds: float) -> bool:
        self.write_seconds.append(seconds)
        await self.wait()
        return True


class World:
    """The lifecycle of worker 0, with stand-ins for the parts that copy bytes and start ranks."""

    def __init__(self, node: SlowNode, folder: Path, round_: int = 4) -> None:
        self.node: Any = node
        self.clock = ManualClock()
        self.pools = Pools(disk=2, fetch=1, store=1)
        self.stager = PlayedStager()
        self.stopped: list[str] = []
        self.rehydrations: list[Round] = []
        self.current = CurrentRound(RoundState(Worker(0), 1, RestartRound(round_), "gpt-0-r0"))
        contract = contract_with(shared_dir=str(folder))
        settings = Settings(contract, settle_seconds=30.0, seal_seconds=45.0)
        changed: Signal[[]] = Signal()
        journeys: Any = Journeys(
            self.current,
            SimpleNamespace(  # type: ignore[arg-type]
                stager=self.stager,
                layouts=RankLayouts(settings.layouts_dir, self.node, self.pools),
                flow=SimpleNamespace(reset=self._nothing, pending=0),
            ),
            SimpleNamespace(  # type: ignore[arg-type]
                progressed=changed,
                filler=SimpleNamespace(stop=self.stopped.append),
                rehydrator=SimpleNamespace(reset=self._nothing, begin=self.rehydrations.append),
            ),
            LocalGang(1),
            SimpleNamespace(  # type: ignore[arg-type]
                reset=self._nothing, end_ranks=self._nothing, has_launcher=True
            ),
            SimpleNamespace(end=self._nothing),  # type: ignore[arg-type]
            changed,
        )
        self.lifecycle = Lifecycle(
            Pod(settings, self.clock, self.current),
            self.node,
            Tiers(self.node, None, self.pools),
            journeys,
            BackgroundLimit(folder, self.clock.monotonic),
            Telemetry(Metrics(), Failures(changed)),
        )

    async def _nothing(self, *_: object) -> None:
        return


@pytest.fixture
def slow(tmp_path: Path) -> SlowNode:
    tier = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    tier.open()
    return SlowNode(tier)


def second_message(round_: int) -> Round:
    """Return the second ROUND of a round; worker 1 coordinates."""
    return round_message(round_, version=2, coordinator=Worker(1), store_host=Worker(1))


async def test_round_of_the_old_round_does_not_unseal_the_new_one(
    slow: SlowNode, tmp_path: Path
) -> None:
    world = World(slow, tmp_path)
    late = asyncio.create_task(world.lifecycle.round(OPERATOR, second_message(4)))
    assert await asyncio.to_thread(slow.writing.wait, 120)
    seal = asyncio.create_task(world.lifecycle.seal(OPERATOR, Seal(RestartRound(5))))
    await asyncio.sleep(0)  # the seal takes effect in memory at its first turn
    assert world.current.state.round == 5
    assert world.stopped == ["round 5 is sealed"]
    slow.go_on.set()
    with pytest.raises(StaleRoundError):
        await late
    await seal
    state = world.current.state
    assert (state.round, state.accepted) == (5, None), "sealed for 5"
    assert slow.read_round() == (5, 0), "and durably so"
    assert world.rehydrations == []
    world.pools.close()


async def test_a_seal_that_is_repeated_takes_no_longer_than_one(
    slow: SlowNode, tmp_path: Path
) -> None:
    """The operator repeats the SEAL every few seconds, and continues without a holder after a minute."""
    world = World(slow, tmp_path)
    slow.go_on.set()

    async def takes_20_seconds() -> None:
        world.clock.advance(20.0)

    world.stager.wait = takes_20_seconds
    for _ in range(3):
        await world.lifecycle.seal(OPERATOR, Seal(RestartRound(5)))
    assert world.stager.settle_seconds == [30.0, 0.0, 0.0]
    assert world.stager.write_seconds == [25.0, 0.0, 0.0]
    await world.lifecycle.seal(OPERATOR, Seal(RestartRound(6)))
    assert world.stager.settle_seconds[-1] == 30.0, "another round"
    world.pools.close()


async def test_an_inventory_from_before_the_end_of_a_seal_does_not_carry_its_round(
    slow: SlowNode, tmp_path: Path
) -> None:
    """Its list lacks the shards that the seal still had to write, so the operator would choose an older
    step."""
    listing, go_on = threading.Event(), threading.Event()

    def list_shards() -> list[Any]:
        first = not listing.is_set()
        listing.set()
        assert not first or go_on.wait(120)
        return []

    slow.list_shards = list_shards
    slow.go_on.set()
    world = World(slow, tmp_path)
    writes_end = asyncio.Event()
    world.stager.wait = writes_end.wait
    seal = asyncio.create_task(world.lifecycle.seal(OPERATOR, Seal(RestartRound(5))))
    early = asyncio.create_task(world.lifecycle.inventory())
    await asyncio.to_thread(listing.wait, 120)
    writes_end.set()
    assert (await seal).round == 5
    go_on.set()
    assert (await early).round == 4
    world.pools.close()
