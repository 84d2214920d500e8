"""A SEAL that comes while a ROUND of the old round is being recorded: the seal wins.

Real pools, fencing state and node tier; what a settled seal would stop is played by stand-ins.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from tests.support.sidecar.rounds import round_message

from holdfast_core.clock import ManualClock
from holdfast_core.errors import StaleRoundError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Worker
from holdfast_core.messages.schema import Round, Seal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import OPERATOR, RoundState
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.process.parts import Keeper


class SlowNode:
    """The node tier, but a write of the round file waits until the test lets it go on."""

    def __init__(self, tier: DiskNodeTier) -> None:
        self._tier = tier
        self.writing = threading.Event()
        self.go_on = threading.Event()

    def read_round(self) -> tuple[RestartRound, int] | None:
        return self._tier.read_round()

    def write_round(self, round_: RestartRound, version: int) -> None:
        self.writing.set()
        assert self.go_on.wait(30)
        self._tier.write_round(round_, version)

    def list_manifests(self) -> tuple[tuple[JobUid, CheckpointId], ...]:
        return self._tier.list_manifests()


@pytest.fixture
def slow(tmp_path: Path) -> SlowNode:
    tier = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    tier.open()
    return SlowNode(tier)


def second_message(round_: int) -> Round:
    """Return the second ROUND of a round; worker 1 coordinates."""
    return round_message(round_, version=2, coordinator=Worker(1), store_host=Worker(1))


def parts_of(state: RoundState, node: SlowNode, pools: Pools) -> Any:
    """As far as SEAL and ROUND use them."""
    return SimpleNamespace(
        settings=SimpleNamespace(
            settle_seconds=30.0, seal_seconds=45.0, contract=Mock(job_uid="job", birth_round=0)
        ),
        clock=ManualClock(),
        keeper=Keeper(state),
        pools=pools,
        pacing=Mock(),
        node=node,
        coordinator=None,
        filler=Mock(),
        flow=Mock(reset=AsyncMock(), pending=0),
        rehydrator=Mock(reset=AsyncMock()),
        starter=Mock(reset=AsyncMock(), end_ranks=AsyncMock()),
        stager=Mock(settle=AsyncMock(return_value=True), write_held=AsyncMock(return_value=True)),
        gang=Mock(),
        failures=Mock(),
        metrics=Mock(),
    )


async def test_round_of_the_old_round_does_not_unseal_the_new_one(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(disk=2, copy=1, store=1)
    sealed = RoundState(worker=Worker(0), procs_per_worker=1, round=RestartRound(4))
    parts = parts_of(sealed, slow, pools)
    lifecycle = Lifecycle(parts)
    monkeypatch.setattr(lifecycle, "inventory", AsyncMock())
    late = asyncio.create_task(lifecycle.round(OPERATOR, second_message(4)))
    await asyncio.to_thread(slow.writing.wait, 30)
    seal = asyncio.create_task(lifecycle.seal(OPERATOR, Seal(RestartRound(5))))
    await asyncio.sleep(0)  # the seal is in force in memory at its first turn
    assert parts.keeper.state.round == 5
    parts.filler.stop.assert_called_once_with("round 5 is sealed")
    slow.go_on.set()
    with pytest.raises(StaleRoundError):
        await late
    await seal
    assert (parts.keeper.state.round, parts.keeper.state.held) == (5, None), "sealed for 5"
    assert slow.read_round() == (5, 0), "and durably so"
    parts.rehydrator.begin.assert_not_called()
    pools.close()


async def test_a_seal_that_is_repeated_takes_no_longer_than_one(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator asks again every few seconds, and goes on without a holder after a minute."""
    pools = Pools(disk=2, copy=1, store=1)
    parts = parts_of(RoundState(Worker(0), 1, RestartRound(4)), slow, pools)
    lifecycle = Lifecycle(parts)
    monkeypatch.setattr(lifecycle, "inventory", AsyncMock())
    slow.go_on.set()

    async def takes(*_: object) -> bool:
        parts.clock.advance(20.0)
        return True

    parts.stager.settle.side_effect = takes
    parts.stager.write_held.side_effect = takes
    for _ in range(3):
        await lifecycle.seal(OPERATOR, Seal(RestartRound(5)))
    assert [c.args[0] for c in parts.stager.settle.await_args_list] == [30.0, 0.0, 0.0]
    assert [c.args[1] for c in parts.stager.write_held.await_args_list] == [25.0, 0.0, 0.0]
    await lifecycle.seal(OPERATOR, Seal(RestartRound(6)))
    assert parts.stager.settle.await_args.args == (30.0,), "another round"
    pools.close()


async def test_an_inventory_from_before_the_end_of_a_seal_does_not_carry_its_round(
    slow: SlowNode, tmp_path: Path
) -> None:
    """Its list lacks what the seal had still to write: the operator would choose an older step."""
    listing, go_on = threading.Event(), threading.Event()

    def list_shards() -> list[Any]:
        first = not listing.is_set()
        listing.set()
        assert not first or go_on.wait(120)
        return []

    pools = Pools(disk=2, copy=1, store=1)
    parts = parts_of(RoundState(Worker(0), 1, RestartRound(4)), slow, pools)
    parts.settings.slots_dir = tmp_path
    parts.settings.contract.pod_name = "gpt-0-r0"
    parts.stager.memory = {}
    parts.gang.running_round = None
    parts.node = SimpleNamespace(
        read_round=slow.read_round,
        write_round=slow.write_round,
        list_manifests=slow.list_manifests,
        list_shards=list_shards,
        free_bytes=lambda: 1,
    )
    lifecycle = Lifecycle(parts)
    slow.go_on.set()
    writes_end = asyncio.Event()

    async def settle(*_: object) -> bool:
        await writes_end.wait()
        return True

    parts.stager.settle.side_effect = settle
    seal = asyncio.create_task(lifecycle.seal(OPERATOR, Seal(RestartRound(5))))
    early = asyncio.create_task(lifecycle.inventory())
    await asyncio.to_thread(listing.wait, 120)
    writes_end.set()
    assert (await seal).round == 5
    go_on.set()
    assert (await early).round == 4
    pools.close()
