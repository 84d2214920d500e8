"""Slots of a sidecar whose disk is too slow: which steps are written and which wait."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.gated_stager import (
    CAPACITY,
    FREE,
    OWNED,
    RANK,
    ROUND,
    running,
)

from holdfast_core.errors import NotFoundError, RefusedError
from holdfast_core.ids import Step
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotFile, SlotHeader, SlotState, slot_name


async def test_with_two_slots_every_step_is_written_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        world.node.let(1, 2)
        await world.until(lambda: world.slots() == [FREE, FREE])
        assert sorted(world.node.begun) == [1, 2]
        assert not world.stager.waits


async def test_a_write_waits_while_a_rank_copies(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as world:
        copying = SlotFile.open(world.settings.slots_dir, slot_name(RANK, 1))
        copying.write_header(SlotHeader(SlotState.FILLING, RANK, CAPACITY, ROUND, Step(2)))
        await world.save(0, 1)
        world.node.let(1)
        await world.until(lambda: world.slots()[0] is FREE)  # although this copy never ends
        copying.close()
        assert world.stored() == [1]
        assert world.metric("holdfast_foreground_wait_seconds_total") > 0


async def test_one_write_at_a_time_and_the_chosen_step_next(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.save(2, 3)
        assert world.stager.waiting(RANK) == (2, 3)
        assert world.stager.writes(RANK)
        world.stager.choose(Step(3))
        assert world.stager.waiting(RANK) == (2, 3), "step 1 is being written"
        world.node.let(1)
        await world.until(lambda: world.stager.waiting(RANK) == (2,))
        assert world.slots() == [FREE, OWNED, OWNED]
        assert world.stager.under_way(RANK) == (2, 3)
        world.node.let(3)
        await world.until(lambda: world.slots() == [FREE, OWNED, FREE])
        assert world.stored() == [1, 3]
        record = next(r for r in world.node.list_shards() if r.header.step == 3)
        assert world.stager.memory[slot_name(RANK, 2)] == record


async def test_a_slot_is_free_when_its_step_is_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.save(2, 3)
        world.stager.forget(frozenset({Step(2)}))
        assert world.slots() == [OWNED, FREE, OWNED]
        assert world.metric("holdfast_steps_dropped_total") == 1
        await world.save(1, 4)
        assert world.stager.waiting(RANK) == (3, 4)


async def test_a_step_that_is_pruned_while_it_is_written_is_passed_on(tmp_path: Path) -> None:
    """The table of this worker's shards has it deleted, however often the disk refuses."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        world.stager.forget(frozenset({Step(1)}))
        assert world.slots() == [OWNED, OWNED, FREE]
        assert world.stager.under_way(RANK) == (2,)
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(lambda: world.slots() == [FREE, FREE, FREE])
        assert await world.stager.settle(HANG_SECONDS)
        assert [o.stage.step for o in world.outcomes] == [1, 2]
        assert slot_name(RANK, 0) not in world.stager.memory


@pytest.mark.fault("A state grows, or a gang restarts, while a slow disk still writes its slots")
async def test_a_new_file_is_taken_under_the_name_of_a_slot_that_is_written(tmp_path: Path) -> None:
    """The rank creates larger slots under the names of those that it had. The save that followed failed,
    also the last one of a training, although it would have waited for a free slot."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        for step in (2, 3):
            world.create(0)
            await world.save(0, step)
        assert world.stager.waiting(RANK) == (2, 3)
        world.create(0)
        with pytest.raises(
            RefusedError, match="being written"
        ):  # else a trainer takes all descriptors
            await world.save(0, 4)
        world.stager.forget(frozenset({Step(2)}))
        world.node.let(1)
        await world.until(lambda: not world.stager.writes(RANK))
        world.stager.choose(Step(3))
        world.node.let(3)
        await world.until(lambda: world.stored() == [1, 3])


@pytest.mark.fault("A sidecar dies when a slot was replaced while it was written")
async def test_the_newer_slot_of_a_name_is_recovered(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        world.create(0)
        await world.save(0, 2)
        world.node.let(1)
        await world.until(lambda: not world.stager.writes(RANK))
        assert world.slots()[0] is OWNED, "the end of the first write has not freed the other file"
        world.stager.abandon()
        world.life()
        world.stager.choose(Step(2))
        world.node.let(2)
        await world.until(lambda: world.slots()[0] is FREE)
        assert world.stored() == [1, 2]


@pytest.mark.fault("A sidecar dies when a slot was replaced while it was written")
async def test_a_save_whose_slot_was_replaced_is_known_by_its_shard(tmp_path: Path) -> None:
    """The rank asks again after the restart. Of a save that was not written it would wait for levels."""
    async with running(tmp_path, 3) as world:
        written, lost = world.fill(0, 1), world.fill(1, 2)
        for stage in (written, lost):
            await world.stager.stage(lambda: world.state, stage)
        world.node.let(1)
        await world.until(lambda: not world.stager.writes(RANK))
        for index in (0, 1):
            world.create(index)
        for layout in world.settings.layouts_dir.iterdir():
            layout.unlink()
        world.stager.abandon()
        world.life()
        await world.stager.stage(lambda: world.state, written)
        with pytest.raises(NotFoundError):
            await world.stager.stage(lambda: world.state, lost)
        assert world.slots() == [FREE] * 3
        assert world.stored() == [1]


async def test_a_chosen_step_that_cannot_be_written_is_a_failed_save(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        world.node.fails = {2}
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(lambda: world.slots() == [FREE] * 3)
        await world.until(lambda: len(world.outcomes) == 2)
        assert world.outcomes[-1].failed is not None
        assert world.stager.under_way(RANK) == (), "so that the other ranks give it up"


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 2 MiB as the shared volume of `tmp_path`."""
    shared = tmp_path / "shared"
    shared.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(shared)], check=True)
    yield shared
    subprocess.run(["umount", "--lazy", str(shared)], check=True)


@pytest.mark.fault("A trainer truncates its slot and fills the volume")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("slots", [2, 3], ids=["written at once", "waits in memory"])
async def test_a_trainer_that_truncates_its_slot_and_fills_the_volume_ends_no_task(
    tmp_path: Path, small_volume: Path, slots: int
) -> None:
    """The sidecar writes the state of a slot into a page that the truncation removed, and the volume has
    no page left. An exception that ended a task of the sidecar would end the process."""
    async with running(tmp_path, slots) as world:
        asyncio.get_running_loop().set_exception_handler(world.died)
        await world.save(0, 1)
        os.truncate(world.settings.slots_dir / slot_name(RANK, 0), 0)
        # Without its note, the slot could take the page of the note.
        (small_volume / "staged").rename(small_volume / "kept")
        with (small_volume / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(1 << 12))
        world.node.let(1)
        await world.until(lambda: bool(world.outcomes or world.deaths))
        assert not world.deaths
        assert world.outcomes[0].failed is not None
        (small_volume / "filler").unlink()
        os.truncate(world.settings.slots_dir / slot_name(RANK, 0), HEADER_BYTES + CAPACITY)
        world.life()
        await world.save(1, 2)
        world.node.let(2)
        await world.until(lambda: len(world.outcomes) == 2)
        assert world.stored() == [2]
