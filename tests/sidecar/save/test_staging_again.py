"""A step that is saved again, while its first save is being written and afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.sidecar.gated_stager import (
    FREE,
    OWNED,
    RANK,
    running,
)

from holdfast_core.errors import RefusedError
from holdfast_core.messages.schema import Refusal
from holdfast_core.shm.slot_file import SlotState

OTHER = bytes(1000)


@pytest.mark.parametrize("slots", [2, 3], ids=["written at once", "waits in memory"])
async def test_a_step_that_is_saved_again_is_acknowledged_when_its_bytes_are_the_same(
    tmp_path: Path, slots: int
) -> None:
    """This holds while the earlier save is written, while it waits in memory, and when it is durable."""
    async with running(tmp_path, slots) as world:
        await world.save(0, 1)
        again = asyncio.create_task(world.save(1, 1))
        await asyncio.sleep(0)  # the request runs up to its first wait
        assert not again.done(), "the bytes of the first save are not known yet"
        world.node.let(1)
        await again
        await world.until(lambda: world.slots() == [FREE] * slots)
        await world.save(0, 1)
        assert world.slots() == [FREE] * slots
        assert world.node.begun == [1], "it is compared, not written"


@pytest.mark.fault("A step is saved again with other bytes, in a pod")
@pytest.mark.parametrize("slots", [2, 3], ids=["written at once", "waits in memory"])
async def test_a_step_that_is_saved_again_with_other_bytes_is_refused(
    tmp_path: Path, slots: int
) -> None:
    async with running(tmp_path, slots) as world:
        await world.save(0, 1)
        again = asyncio.create_task(world.save(1, 1, OTHER))
        world.node.let(1)
        with pytest.raises(RefusedError, match="saved step 1 with other bytes before") as refused:
            await again
        assert refused.value.code == Refusal.CONFLICT
        assert world.slots()[1] is SlotState.FULL, "the rank frees it"
        assert world.stored() == [1]
        (record,) = world.node.list_shards()
        world.clear(1)
        await world.save(1, 1)
        with pytest.raises(RefusedError, match=f"1000 bytes with {record.blake3}"):
            await world.save(1, 1, OTHER + b"1")


@pytest.mark.fault("A step in memory is saved again with other bytes")
async def test_a_step_in_memory_that_is_saved_again_is_compared_in_memory(tmp_path: Path) -> None:
    async with running(tmp_path, 4) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.save(2, 2)
        with pytest.raises(RefusedError, match="saved step 2 with other bytes before"):
            await world.save(3, 2, OTHER)
        assert world.slots() == [OWNED, OWNED, FREE, SlotState.FULL]
        assert world.stager.waiting(RANK) == (2,)


async def test_a_step_whose_save_has_failed_can_be_saved_again(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as world:
        world.node.fails.add(1)
        await world.save(0, 1)
        world.node.let(1)
        await world.until(lambda: bool(world.outcomes))
        world.node.fails.clear()
        await world.save(1, 1, OTHER)
        await world.until(lambda: world.stored() == [1])


async def test_a_repeated_save_that_is_sent_again_has_the_result_of_the_first_request(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 2) as world:
        await world.save(0, 1)
        stage = world.fill(1, 1)
        requests = [
            asyncio.create_task(world.stager.stage(lambda: world.state, stage)) for _ in range(2)
        ]
        world.node.let(1)
        await asyncio.gather(*requests)
        await world.until(lambda: world.slots() == [FREE, FREE])


async def test_a_repeated_save_that_is_sent_again_is_owned_once_when_the_first_save_fails(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 2) as world:
        world.node.fails.add(1)
        await world.save(0, 1)
        stage = world.fill(1, 1)
        requests = [
            asyncio.create_task(world.stager.stage(lambda: world.state, stage)) for _ in range(2)
        ]
        await asyncio.sleep(0)  # both wait for the first save
        world.node.let(1)
        await asyncio.gather(*requests)
