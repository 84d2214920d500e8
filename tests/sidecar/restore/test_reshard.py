"""The sidecar assembles a payload from ranges of other ranks' shards, which it reads from node, members
and store. Ranges that are bad or missing at one source are read from another."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.sidecar.reshard_world import ROWS, WANTED, World, payload_of
from tests.support.shards.placements import Tensor, bytes_read, layout_of, plan
from tests.support.tiers.faulty import Fault, Faults

from holdfast_core.errors import (
    AccessDeniedError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    Refusal,
    RefusedError,
    StateMismatchError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Rank, TierName, Worker
from holdfast_core.shards.file import CHUNK_BYTES, ShardRecord, Trailer, trailer_bytes
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotFile, SlotHeader, SlotState, slot_name


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def header_in(root: Path) -> SlotHeader:
    return SlotHeader.unpack((root / slot_name(Rank(1), 0)).read_bytes()[:HEADER_BYTES])


GOOD = payload_of(WANTED, 1)


def planned(world: World, missing: Mapping[Rank, str] | None = None) -> int:
    """Return the payload bytes that the plan reads."""
    shards = world.manifest.shards
    moves = plan(WANTED, 3, shards, world.layouts.__getitem__, missing or {})
    return bytes_read(moves, [layout.payload_bytes for layout in world.layouts], CHUNK_BYTES)


def tables(*records: ShardRecord) -> int:
    return sum(trailer_bytes(record.header) for record in records)


def test_only_the_chunks_that_are_needed_are_read(world: World) -> None:
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.asked == [("worker 4", 1), ("worker 4", 2)]
    read = planned(world) + tables(world.records[1], world.records[2])
    assert world.counted("holdfast_fetched_bytes") == {"peer": read}
    assert planned(world) < WANTED.payload_bytes + 5 * CHUNK_BYTES
    assert not world.node.list_shards(), "nothing is brought whole"
    header = header_in(world.root)
    assert (header.state, header.step, header.payload_bytes) == (SlotState.FREE, None, 0)


def test_sources_are_tried_from_the_node_to_the_store(world: World) -> None:
    world.put(world.node, 0, 1, 2, 3)
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    world.upload(0, 1, 2, 3)
    assert world.fill() == (TierName.NODE, GOOD)
    assert world.asked == []
    assert world.counted("holdfast_fetched_bytes") == {"node": planned(world)}


def test_the_store_serves_what_no_member_has(world: World) -> None:
    world.upload(0, 1, 2, 3)
    assert world.fill() == (TierName.OBJECT, GOOD)
    assert set(world.counted("holdfast_fetched_bytes")) == {"object"}


def test_a_bad_chunk_on_this_node_is_had_elsewhere(world: World) -> None:
    world.put(world.node, 0, 1, 2, 3)
    world.put(world.members[Worker(4)], 1)
    world.spoil("node", 1)
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.node.find(world.records[1].ref) is None, "the bad copy is put aside"
    assert world.counted("holdfast_corruptions_detected") == {"node": 1}
    assert world.reported_copies == []


def test_a_member_with_bad_bytes_is_notified_and_the_next_one_is_used(world: World) -> None:
    for worker in world.members:
        world.put(world.members[worker], 0, 1, 2, 3)
    world.spoil("member4", 1)
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.reported_copies == [(4, 1)]
    assert ("worker 5", 1) in world.asked
    assert world.counted("holdfast_corruptions_detected") == {"peer": 1}


def test_a_member_that_goes_in_the_middle_is_not_accused(world: World) -> None:
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    world.faults[Worker(4)] = Faults([Fault("read")])
    world.upload(0, 1, 2, 3)
    assert world.fill() == (TierName.OBJECT, GOOD)
    assert world.reported_copies == []
    assert world.counted("holdfast_corruptions_detected") == {}


def test_a_member_that_does_not_answer_is_asked_last_from_then_on(world: World) -> None:
    """Otherwise each shard would wait for the member's time-out."""
    for worker in world.members:
        world.put(world.members[worker], 0, 1, 2, 3)
    world.faults[Worker(4)] = Faults([Fault("read")])
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.asked == [("worker 4", 1), ("worker 5", 1), ("worker 5", 2)]


def test_the_member_whose_rank_saved_the_shard_is_asked_first(world: World) -> None:
    world.members = {Worker(w): world.members[Worker(4)] for w in (4, 2, 1)}
    world.faults = {worker: Faults() for worker in world.members}
    world.put(world.members[Worker(1)], 0, 1, 2, 3)
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.asked == [("worker 1", 1), ("worker 2", 2)]


def test_a_bad_copy_in_the_store_is_counted(world: World) -> None:
    world.upload(0, 1, 2, 3)
    world.put(world.members[Worker(4)], 2)
    world.spoil("store", 1)
    with pytest.raises(NotFoundError, match=r"rank 1: object store: .*chunks \[1\] do not match"):
        world.fill()
    assert world.counted("holdfast_corruptions_detected") == {"object": 1}


def test_a_table_that_is_not_the_manifests_is_not_believed(world: World) -> None:
    """The payload's digest binds the digests of the chunks, and the manifest binds the CRCs."""
    for worker in world.members:
        world.put(world.members[worker], 0, 1, 2, 3)
    record = world.records[1]
    with world.source.open_shard(record.ref) as reader:
        table = replace(reader.table, crcs=(0, *reader.table.crcs[1:]))
    lie = Trailer(replace(record, chunk_table=digest_of(table.pack())), table)
    world.forged[Worker(4)] = lie
    assert world.fill() == (TierName.PEER, GOOD)
    assert (4, 1) in world.reported_copies


def test_another_holder_serves_for_a_shard_that_is_nowhere(world: World) -> None:
    """Ranges that the first plan has read are not read again."""
    world.put(world.members[Worker(4)], 0, 1)
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.asked == [("worker 4", 1), ("worker 4", 2), ("worker 5", 2), ("worker 4", 0)]
    read = planned(world, {Rank(2): "nowhere"}) + tables(world.records[0], world.records[1])
    assert world.counted("holdfast_fetched_bytes") == {"peer": read}


def test_missing_bytes_are_named_and_the_slot_is_released(world: World) -> None:
    world.put(world.members[Worker(4)], 0, 1)
    world.spoil("member4", 1)
    world.store_faults = Faults([Fault("size", CorruptionError("the store has other bytes"))])
    with pytest.raises(NotFoundError) as caught:
        world.fill()
    text = str(caught.value)
    for part in ("rank 1: node tier", "rank 1: worker 4", "worker 5", "other bytes"):
        assert part in text
    header = header_in(world.root)
    assert (header.state, header.step, header.payload_bytes) == (SlotState.FILLING, None, 0)


def test_a_holder_that_is_busy_is_asked_again_for_the_rest(world: World) -> None:
    """Ranks that start together request from the same few members. If they gave up, a new round would send
    the same requests again."""
    world.put(world.members[Worker(4)], 1, 2)
    world.faults[Worker(4)] = Faults([Fault("read", first=2, times=2)])

    def free(waits: int) -> None:
        if waits == 2:
            world.faults[Worker(4)].clear()

    world.clock.at = free
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.clock.waits == 2
    opened = [rank for who, rank in world.asked if who == "worker 4" and rank in (1, 2)]
    read = planned(world) + tables(*(world.records[rank] for rank in opened))
    assert world.counted("holdfast_fetched_bytes") == {"peer": read}, "no chunk was read twice"
    assert world.waits == [], "it took less than a minute"


def test_a_member_that_stays_away_is_reported_and_called_again(world: World) -> None:
    world.faults[Worker(4)] = Faults([Fault("read")])
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    reported: list[int] = []

    def back(waits: int) -> None:
        reported.append(len(world.waits))
        if world.waits:
            world.faults[Worker(4)].clear()

    world.clock.at = back
    before = world.clock.monotonic()
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.clock.monotonic() - before > 60
    assert reported[-2:] == [0, 1]
    assert "rank 1: worker 4" in world.waits[0]


@pytest.mark.fault("The store refuses its keys during a restore")
@pytest.mark.parametrize(
    "error", [AccessDeniedError("other keys"), RefusedError(Refusal.BUSY, "not yet")]
)
def test_a_place_that_refuses_now_is_asked_again(world: World, error: HoldfastError) -> None:
    """The shards may be there: a fill that gave up would let the job go back to an older step."""
    world.upload(0, 1, 2, 3)
    world.store_faults = Faults([Fault("size", error)])

    def allowed(waits: int) -> None:
        if waits == 2:
            world.store_faults.clear()

    world.clock.at = allowed
    assert world.fill() == (TierName.OBJECT, GOOD)
    assert world.clock.waits == 2


def test_bytes_that_no_place_has_are_not_waited_for(world: World) -> None:
    """The member that does not answer has none of these bytes."""
    world.put(world.members[Worker(4)], 0, 2)
    world.put(world.members[Worker(5)], 0, 2)
    world.faults[Worker(4)] = Faults([Fault("read")])
    world.faults[Worker(5)] = Faults([Fault("read", times=1)])
    everything = layout_of({"w": Tensor("F32", (ROWS, 4))}, [4], 3)
    with pytest.raises(
        NotFoundError, match=r"(?s)rank 3: worker 4: .*expected it in the shard of rank 3"
    ):
        world.fill(everything)
    assert (world.asked[0][1], world.clock.waits) == (2, 0)


def test_other_tensors_are_a_mismatch(world: World) -> None:
    with pytest.raises(StateMismatchError, match="v: expected F32"):
        world.fill(layout_of({"v": Tensor("F32", (2,))}, [1], 0))
    assert world.asked == []


class FullSlot(SlotFile):
    def write_payload(self, offset: int, data: memoryview) -> None:
        if len(data) > CHUNK_BYTES:
            raise OSError(errno.ENOSPC, "no room in shared memory")
        SlotFile.write_payload(self, offset, data)


def test_a_slot_that_fails_is_no_sources_fault(world: World) -> None:
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    name = slot_name(Rank(1), 0)
    (world.root / name).touch()
    slot = SlotFile.open(world.root, name)
    with pytest.raises(OSError, match="no room in shared memory"):
        world.fill(slot=FullSlot(name, slot.fd))
    assert world.reported_copies == []
    assert {name for name, _ in world.asked} == {"worker 4"}


def test_only_the_layouts_that_are_needed_are_read(world: World) -> None:
    """Ranks 0 and 2 hold the same, and so do ranks 1 and 3."""
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.layouts_read == [1, 2]


@pytest.mark.fault("No place has a layout during a reshard")
def test_another_holder_serves_for_a_rank_whose_layout_is_nowhere(world: World) -> None:
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    world.layout_errors[Rank(2)] = NotFoundError("no place has it")
    assert world.fill() == (TierName.PEER, GOOD)
    assert {rank for _, rank in world.asked} == {0, 1}


@pytest.mark.fault("The holder of a layout is away during a reshard")
def test_a_layout_whose_holder_comes_back_is_read(world: World) -> None:
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    for rank in (0, 2):
        world.layout_errors[Rank(rank)] = UnavailableError("connection refused")

    def back(waits: int) -> None:
        if waits == 2:
            world.layout_errors.clear()

    world.clock.at = back
    assert world.fill() == (TierName.PEER, GOOD)
    assert world.clock.waits == 2


def test_layouts_that_no_place_has_are_named(world: World) -> None:
    world.put(world.members[Worker(4)], 0, 1, 2, 3)
    for rank in (0, 2):
        world.layout_errors[Rank(rank)] = NotFoundError("layout: no place has it")
    with pytest.raises(NotFoundError, match=r"rank 2: layout: no place has it.*without them: "):
        world.fill()
    assert world.clock.waits == 0


# ---------------------------------------------------------------- a shard as it was saved


def whole(world: World) -> bytes:
    return payload_of(world.layouts[1], 1)


def test_a_shard_of_this_node_is_read_as_it_was_saved(world: World) -> None:
    world.put(world.node, 1)
    assert world.fill_shard() == (TierName.NODE, whole(world))
    header = header_in(world.root)
    found = (header.state, header.step, header.round, header.payload_bytes)
    assert found == (SlotState.FREE, 5, 0, len(whole(world)))
    assert world.counted("holdfast_fetched_bytes") == {"node": len(whole(world))}


@pytest.mark.parametrize("last", [False, True])
def test_the_rest_of_a_shard_that_is_damaged_here_comes_from_a_member(
    world: World, last: bool
) -> None:
    world.put(world.node, 1)
    world.put(world.members[Worker(5)], 1)
    world.spoil("node", 1, len(whole(world)) - 1 if last else CHUNK_BYTES)
    assert world.fill_shard() == (TierName.PEER, whole(world))
    assert world.node.find(world.records[1].ref) is None, "the bad copy is put aside"
    assert world.counted("holdfast_corruptions_detected") == {"node": 1}


def test_a_shard_whose_last_copy_does_not_answer_is_waited_for(world: World) -> None:
    world.put(world.node, 1)
    world.spoil("node", 1)
    world.put(world.members[Worker(4)], 1)
    world.faults[Worker(4)] = Faults([Fault("read")])

    def back(waits: int) -> None:
        if world.waits:
            world.faults[Worker(4)].clear()

    world.clock.at = back
    assert world.fill_shard() == (TierName.PEER, whole(world))
    assert "rank 1: worker 4" in world.waits[0]


def test_a_shard_that_no_place_has_names_the_places(world: World) -> None:
    world.put(world.node, 1)
    world.spoil("node", 1)
    with pytest.raises(NotFoundError) as caught:
        world.fill_shard()
    for part in ("node tier: ", "CRC32C of chunk 1", "worker 4: ", "worker 5: ", "object store: "):
        assert part in str(caught.value)
    assert world.clock.waits == 0
