"""Slots of a sidecar whose disk is too slow. A stand-in tier writes when the test lets it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from tests.support.shards.builders import BytesSource, manifest
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import first_round

from holdfast_core.clock import SystemClock
from holdfast_core.errors import RefusedError, UnavailableError
from holdfast_core.format.digest import digest_of
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import RankBuffered, Refusal, Stage, Staged
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing.background_limit import BackgroundLimit
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.shm.slot_header import HEADER_BYTES, SlotHeader, SlotState, slot_name
from holdfast_core.tiers.base import PayloadSource
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.slot_writes import Outcome
from holdfast_sidecar.save.staging import Stager

RANK, ROUND = Rank(0), RestartRound(0)
LAYOUT = digest_of(b"{}")
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
            assert self._changed.wait_for(lambda: header.step in self._open, 120)
        if header.step in self.fails:
            raise UnavailableError(f"step {header.step}: the disk fails")
        return super().write_shard(header, source)


class World:
    """A stager over real slots and a real, gated node tier."""

    def __init__(self, root: Path, slots: int) -> None:
        self.settings = Settings(replace(CONTRACT, shared_dir=str(root / "shared")))
        self.settings.slots_dir.mkdir(parents=True)
        for index in range(slots):
            path = self.settings.slots_dir / slot_name(RANK, index)
            path.write_bytes(SlotHeader(SlotState.FREE, RANK, CAPACITY).pack())
            with path.open("r+b") as file:
                file.truncate(HEADER_BYTES + CAPACITY)
        self.node = GatedTier(root / "node")
        self.node.open()
        self.pools = Pools(disk=2, copy=1, store=1)
        self.metrics = Mock()
        self.outcomes: list[Outcome] = []
        self._changed = asyncio.Event()
        state = first_round()
        assert state.accepted is not None
        policy = replace(state.accepted.policy, slots=slots)
        self.state: RoundState = replace(state, accepted=replace(state.accepted, policy=policy))
        self.stager = self.life()

    def life(self) -> Stager:
        """Start another sidecar process over the same slots and the same disk, in the same round."""
        self.stager = self.process()
        self.stager.recover(self.state)
        self.stager.coordinator_replied()
        return self.stager

    def process(self) -> Stager:
        failures = Mock(note=Mock(return_value=Mock(reason="Unavailable", message="no")))
        stager = Stager(
            Pod(self.settings, SystemClock(), CurrentRound(self.state)),
            Tiers(self.node, None, self.pools),
            Telemetry(self.metrics, failures),
            Mock(ensure=AsyncMock()),
            BackgroundLimit(
                self.settings.slots_dir, waited_for_copies=self.metrics.waited_for_copies
            ),
        )
        stager.ended.subscribe(self.note)
        stager.buffered_changed.subscribe(self._changed.set)
        return stager

    def note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._changed.set()

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
            await asyncio.wait_for(self._changed.wait(), 120)

    def buffered(self) -> RankBuffered:
        (said,) = self.stager.buffered()
        return said

    async def digested(self, *steps: int) -> None:
        await self.until(lambda: [s.step for s in self.buffered().shards] == list(steps))

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
        assert await world.stager.settle(30)
        world.pools.close()


FREE, OWNED = SlotState.FREE, SlotState.OWNED


async def test_with_two_slots_every_step_is_written_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        world.node.let(1, 2)
        await world.until(lambda: world.slots() == [FREE, FREE])
        assert sorted(world.node.begun) == [1, 2]
        assert world.buffered().shards == ()
        assert world.stager.unreported is None


async def test_a_write_waits_while_a_rank_copies(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as world:
        copying = SlotFile.open(world.settings.slots_dir, slot_name(RANK, 1))
        copying.write_header(SlotHeader(SlotState.FILLING, RANK, CAPACITY, ROUND, Step(2)))
        await world.save(0, 1)
        world.node.let(1)
        await world.until(lambda: world.slots()[0] is FREE)  # although this copy never ends
        copying.close()
        assert world.stored() == [1]
        ((seconds,), _) = world.metrics.waited_for_copies.call_args
        assert seconds > 0


async def test_one_write_at_a_time_and_the_chosen_step_next(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.save(2, 3)
        await world.digested(2, 3)
        assert world.buffered().writing == 1
        world.stager.choose(Step(3))
        assert world.node.begun == [1]
        world.node.let(1)
        await world.until(lambda: world.buffered().writing == 3)
        assert world.slots() == [FREE, OWNED, OWNED]
        world.node.let(3)
        await world.until(lambda: world.slots() == [FREE, OWNED, FREE])
        assert world.stored() == [1, 3]
        said = {s.step: s.stored for s in world.buffered().shards}
        assert said == {2: False, 3: True}, "so that step 3 does not count as lost"
        world.stager.mark_reported(world.stager.buffered())
        assert [s.step for s in world.buffered().shards] == [2]
        record = next(r for r in world.node.list_shards() if r.header.step == 3)
        assert world.stager.memory[slot_name(RANK, 2)] == record


async def test_a_step_in_memory_has_the_digests_that_its_file_gets(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        (said,) = world.buffered().shards
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(lambda: world.stored() == [1, 2])
        stored = next(r for r in world.node.list_shards() if r.header.step == 2)
        assert (said.shard.blake3, said.shard.chunk_table) == (stored.blake3, stored.chunk_table)


async def test_a_slot_is_free_when_its_step_is_dropped_and_the_manifests_are_gone(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.save(2, 3)
        await world.digested(2, 3)
        world.stager.forget(frozenset({Step(2)}))
        assert world.slots() == [OWNED, OWNED, OWNED]
        assert world.stager.find(RANK, CheckpointId(Step(2), ROUND)) is None
        world.stager.release(frozenset({Step(3)}))
        assert world.slots() == [OWNED, OWNED, OWNED], "that one is wanted"
        world.stager.release(frozenset({Step(2)}))
        assert world.slots() == [OWNED, FREE, OWNED]
        world.metrics.dropped.assert_called_with(1)
        await world.save(1, 4)
        await world.digested(3, 4)


async def test_a_step_that_is_pruned_while_it_is_written_does_not_stay_on_the_disk(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        world.stager.forget(frozenset({Step(1)}))
        world.stager.release(frozenset({Step(1)}))
        assert world.slots() == [OWNED, OWNED, FREE]
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(lambda: world.slots() == [FREE, FREE, FREE])
        assert await world.stager.settle(30)
        assert world.stored() == [2]
        assert [o.stage.step for o in world.outcomes] == [2]


async def test_a_chosen_step_that_cannot_be_written_stays_in_memory(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        world.node.fails = {2}
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(
            lambda: [s.failed for s in world.buffered().shards if s.step == 2] == [True]
        )
        assert world.slots() == [FREE, OWNED, FREE]
        assert world.outcomes[-1].failed is not None
        world.node.fails = set()
        world.stager.seal()
        assert await world.stager.write_buffered(frozenset({CheckpointId(Step(2), ROUND)}), 30)
        assert world.stored() == [1, 2]


@pytest.mark.parametrize("dies", [False, True], ids=["same process", "another process"])
async def test_a_seal_writes_what_is_committed_and_nothing_else(tmp_path: Path, dies: bool) -> None:
    async with running(tmp_path, 4) as world:
        await world.save(0, 1)
        for index, step in ((1, 2), (2, 3), (3, 4)):
            await world.save(index, step)
        await world.digested(2, 3, 4)
        world.stager.seal()
        world.stager.choose(Step(2))
        world.node.let(1, 2, 3, 4)
        assert await world.stager.settle(30)
        assert world.node.begun == [1], "nothing is begun any more"
        manifests = frozenset(CheckpointId(Step(s), ROUND) for s in (2, 3))
        for checkpoint in manifests:
            record = world.stager.find(RANK, checkpoint)
            assert record is not None
            other = replace(record, header=replace(record.header, rank=Rank(1)))
            document = manifest([record, other]).to_bytes()
            world.node.put_manifest(CONTRACT.job_uid, checkpoint, document)
        if dies:
            world.stager = world.process()  # the new process has received no ROUND
        assert await world.stager.write_buffered(manifests, 30)
        assert world.node.begun == [1, 2, 3]
        assert world.stored() == [1, 2, 3]
        assert world.slots() == [FREE, FREE, FREE, OWNED]
        world.stager.recover(replace(world.state, round=RestartRound(1)))
        assert world.slots() == [FREE, FREE, FREE, FREE]


async def test_a_seal_reports_that_its_time_ran_out(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        world.node.let(1)
        world.stager.seal()
        assert await world.stager.settle(30)
        manifests = frozenset({CheckpointId(Step(2), ROUND)})
        assert not await world.stager.write_buffered(manifests, 0)
        world.node.let(2)
        assert await world.stager.settle(30), "the next SEAL finds it written"
        assert world.stored() == [1, 2]


async def test_a_restarted_sidecar_recovers_slots_in_memory_and_being_written(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        before = world.buffered().shards
        old = world.stager
        world.life()
        assert world.buffered().digesting == (1, 2), "neither there nor lost"
        assert world.stager.may_find(RANK, CheckpointId(Step(2), ROUND))
        assert not world.stager.may_find(RANK, CheckpointId(Step(3), ROUND))
        await world.digested(1, 2)
        assert world.buffered().shards[1:] == before
        assert not world.stager.may_find(RANK, CheckpointId(Step(2), ROUND))
        assert world.buffered().writing is None
        world.stager.choose(Step(2))
        world.node.let(1, 2)
        await world.until(lambda: world.buffered().shards[-1].stored)
        assert await old.settle(30)


async def test_another_coordinator_receives_everything_again(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        world.stager.mark_reported(world.stager.buffered())
        assert world.stager.unreported is None
        world.stager.coordinator_changed()
        assert world.stager.unreported is not None
        assert not world.stager.has_coordinator
        world.stager.coordinator_replied()
        assert world.stager.has_coordinator
        world.node.let(1)


async def test_a_step_that_is_written_at_once_is_not_reported_as_held(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        assert world.stager.unreported is None
        assert not world.stager.idle
        world.node.let(1)
        await world.until(lambda: world.slots() == [FREE] * 3)
        assert world.stager.unreported is None
        assert world.stager.idle


async def test_a_late_write_of_an_older_round_does_not_count_in_the_new_one(tmp_path: Path) -> None:
    """The new round trains that step again with other bytes, which the coordinator would refuse."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        world.stager.choose(Step(2))
        world.node.let(1)
        await world.until(lambda: world.buffered().writing == 2)
        world.stager.mark_reported(world.stager.buffered())
        world.stager.seal()
        world.state = replace(world.state, round=RestartRound(1))
        world.stager.recover(world.state)
        world.stager.coordinator_replied()
        assert world.buffered().shards == (), "being written"
        assert world.stager.find(RANK, CheckpointId(Step(2), RestartRound(1))) is None
        world.node.let(2)
        await world.until(lambda: world.stored() == [1, 2] and world.slots() == [FREE] * 3)
        assert world.buffered().shards == (), "written"
        assert world.stager.unreported is None


async def test_a_shard_that_an_earlier_process_had_written_frees_its_slot(tmp_path: Path) -> None:
    """The earlier process died before it freed the slot. A step that is on the nodes is not chosen again."""
    async with running(tmp_path, 3) as world:
        await world.save(0, 1)
        header = ShardHeader(CONTRACT.job_uid, ROUND, Step(1), RANK, 2, LAYOUT, 1000)
        record = DiskNodeTier.write_shard(world.node, header, BytesSource(bytes([1]) * 1000))
        world.life()
        await world.until(lambda: world.slots() == [FREE] * 3)
        assert [(s.step, s.stored) for s in world.buffered().shards] == [(1, True)]
        assert [o.record for o in world.outcomes] == [record]
        world.stager.mark_reported(world.stager.buffered())
        assert world.stager.idle


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 2 MiB as the shared volume of `tmp_path`."""
    shared = tmp_path / "shared"
    shared.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(shared)], check=True)
    yield shared
    subprocess.run(["umount", "--lazy", str(shared)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("slots", [2, 3], ids=["written at once", "waits in memory"])
async def test_a_trainer_that_truncates_its_slot_and_fills_the_volume_ends_no_task(
    tmp_path: Path, small_volume: Path, slots: int
) -> None:
    """The sidecar writes the state of a slot into a page that the truncation removed, and the volume has
    no page left. An exception that ended a task of the sidecar would end the process."""
    deaths: list[object] = []

    def died(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        deaths.append(context)
        world.note(Outcome(Mock(), None))

    async with running(tmp_path, slots) as world:
        asyncio.get_running_loop().set_exception_handler(died)
        await world.save(0, 1)
        os.truncate(world.settings.slots_dir / slot_name(RANK, 0), 0)
        # Without its note, the slot could take the page of the note.
        (small_volume / "staged").rename(small_volume / "kept")
        with (small_volume / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(1 << 12))
        world.node.let(1)
        await world.until(lambda: bool(world.outcomes))
        assert not deaths
        assert world.outcomes[0].failed is not None
        (small_volume / "filler").unlink()
        os.truncate(world.settings.slots_dir / slot_name(RANK, 0), HEADER_BYTES + CAPACITY)
        world.life()
        await world.save(1, 2)
        world.node.let(2)
        await world.until(lambda: len(world.outcomes) == 2)
        assert world.stored() == [2]


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


async def test_a_step_in_memory_that_is_saved_again_is_compared_in_memory(tmp_path: Path) -> None:
    async with running(tmp_path, 4) as world:
        await world.save(0, 1)
        await world.save(1, 2)
        await world.digested(2)
        await world.save(2, 2)
        with pytest.raises(RefusedError, match="saved step 2 with other bytes before"):
            await world.save(3, 2, OTHER)
        assert world.slots() == [OWNED, OWNED, FREE, SlotState.FULL]
        assert [shard.step for shard in world.buffered().shards] == [2]


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
        assert await asyncio.gather(*requests) == [Staged(Step(1)), Staged(Step(1))]
