"""A SEAL that arrives while a ROUND of the old round is being recorded takes precedence."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.lifecycle_bed import SlowNode, World
from tests.support.sidecar.rounds import round_message
from tests.support.tiers.faulty import Fault, Faults, Faulty

from holdfast_core.errors import StaleRoundError, TierError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import RestorePoint, Round, Seal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_sidecar.base.rounds import OPERATOR


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
    assert await asyncio.to_thread(slow.writing.wait, HANG_SECONDS)
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
    assert slow.records.read_round() == (5, 0), "and durably so"
    assert world.rehydrations == []
    world.pools.close()


@pytest.mark.fault("A round is sealed while a sidecar that has restarted begins it again")
async def test_a_seal_during_the_begin_of_a_round_writes_what_waits_in_slots(
    slow: SlowNode, tmp_path: Path
) -> None:
    """The begin would free the slots of the old round in the name of the new one, and lose their saves."""
    listing, go_on = threading.Event(), threading.Event()

    def list_shards() -> list[Any]:
        listing.set()
        assert go_on.wait(HANG_SECONDS)
        return []

    slow.list_shards = list_shards
    slow.go_on.set()
    world = World(slow, tmp_path)
    begin = asyncio.create_task(world.lifecycle.round(OPERATOR, second_message(4)))
    assert await asyncio.to_thread(listing.wait, HANG_SECONDS)
    seal = asyncio.create_task(world.lifecycle.seal(OPERATOR, Seal(RestartRound(5))))
    await asyncio.sleep(0)
    go_on.set()
    await begin
    assert (await seal).round == 5
    assert (world.stager.recovered, world.rehydrations) == ([], [])
    assert len(world.stager.write_seconds) == 1
    await world.lifecycle.round(OPERATOR, round_message(5))
    assert world.stager.recovered == [5]
    world.pools.close()


@pytest.mark.fault("A gang restarts again and again in its pods, each time with another structure")
async def test_a_round_begins_without_the_layouts_of_the_one_before(
    slow: SlowNode, tmp_path: Path
) -> None:
    """They are in the memory that the slots need. Those of a round that goes on are still needed."""
    shared = tmp_path / "shared"
    shared.mkdir()
    world, layouts = World(slow, shared), LayoutFiles(shared / "layouts")
    slow.go_on.set()
    await world.lifecycle.seal(OPERATOR, Seal(RestartRound(5)))
    layouts.ensure(b"old", digest_of(b"old"))
    await world.lifecycle.round(OPERATOR, round_message(5))
    assert list(layouts.directory.iterdir()) == []
    layouts.ensure(b"new", digest_of(b"new"))
    world.current.state = replace(world.current.state, accepted=None, version_floor=1)
    await world.lifecycle.round(OPERATOR, round_message(5, version=2))
    assert layouts.read(digest_of(b"new")) == b"new"
    world.pools.close()


@pytest.mark.fault("A node does not say how much room it has, when an inventory is taken")
async def test_a_volume_that_answers_again_is_no_failure(slow: SlowNode, tmp_path: Path) -> None:
    """Else the job would show it until its next round, although every save succeeds."""
    world, node = World(slow, tmp_path), Faulty(slow, Faults([Fault("free_bytes", times=1)]))
    slow.free_bytes = node.free_bytes  # type: ignore[attr-defined]
    await world.lifecycle.inventory()
    assert [failure.tier for failure in world.failures.current] == [TierName.NODE]
    await world.lifecycle.inventory()
    assert world.failures.current == ()
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
        assert not first or go_on.wait(HANG_SECONDS)
        return []

    slow.list_shards = list_shards
    slow.go_on.set()
    world = World(slow, tmp_path)
    writes_end = asyncio.Event()
    world.stager.wait = writes_end.wait
    seal = asyncio.create_task(world.lifecycle.seal(OPERATOR, Seal(RestartRound(5))))
    early = asyncio.create_task(world.lifecycle.inventory())
    await asyncio.to_thread(listing.wait, HANG_SECONDS)
    writes_end.set()
    assert (await seal).round == 5
    go_on.set()
    assert (await early).round == 4
    world.pools.close()


@pytest.mark.fault("A node's disk fails for a moment when a round begins")
@pytest.mark.parametrize(
    "error", [TierError("listing: Input/output error"), OSError(errno.EIO, "Input/output error")]
)
async def test_a_round_that_could_not_begin_begins_when_it_is_repeated(
    slow: SlowNode, tmp_path: Path, error: Exception
) -> None:
    """A sidecar that took the round for begun would neither restore nor coordinate, and the gang would wait
    without end."""
    slow.go_on.set()
    world = World(slow, tmp_path)
    message = round_message(4, version=1, restore_point=RestorePoint(Step(10), RestartRound(3)))
    errors = [error]

    def list_shards() -> list[Any]:
        if errors:
            raise errors.pop()
        return []

    slow.list_shards = list_shards
    with pytest.raises(type(error)):
        await world.lifecycle.round(OPERATOR, message)
    assert world.current.state.accepted is None
    assert world.ended == [4], "requests for the plan no longer wait for it"
    await world.lifecycle.round(OPERATOR, message)
    assert world.rehydrations == [message]
    world.pools.close()
