"""Every chunk that a pack omits is found bit for bit in the checkpoints to which the pack refers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shards.packs import Saved, plan_ranks, trailer_of
from tests.support.shards.placements import shards_of

from holdfast_core.errors import CorruptionError
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import ByteRange, CheckpointId, Rank, ShardRef
from holdfast_core.shards.pack import (
    BLOCK_CHUNKS,
    MAX_EARLIER,
    owner,
    pack_index,
    replica_group,
    unpack_index,
)
from holdfast_core.store.download.stored import ShardPlaces, StoredShard
from holdfast_core.store.rules import most_needed

CHUNK = 4096


def payload_of(values: list[int]) -> bytes:
    """Return a payload with one chunk for each value. The last chunk is shorter."""
    return b"".join(bytes([value]) * CHUNK for value in values)[:-7]


def saved(step: int, *ranks: list[int], base: Saved | None = None, **more: object) -> Saved:
    trailers = [
        trailer_of(payload_of(values), step=step, rank=rank, chunk_bytes=CHUNK)
        for rank, values in enumerate(ranks)
    ]
    return plan_ranks(trailers, base, **more)  # type: ignore[arg-type]


class Store:
    """The places of the chunks in all objects, from which a restore reads."""

    def __init__(self) -> None:
        self.shards: dict[ShardRef, StoredShard] = {}
        self.asked: set[ShardRef] = set()

    def add(self, step: Saved) -> None:
        for trailer, pack in zip(step.trailers, step.packs, strict=True):
            if pack is not None:
                data = pack_index(pack)
                assert unpack_index(data, pack.stored_bytes + len(data)) == pack
            ref = trailer.record.ref
            self.shards[ref] = StoredShard(f"{ref.step}/{ref.rank}", trailer, 0, pack)

    def find(self, ref: ShardRef) -> StoredShard:
        self.asked.add(ref)
        return self.shards[ref]

    def restore(self, ref: ShardRef) -> None:
        """Check that every chunk is found where it is stored, with the right digest."""
        own = self.shards[ref]
        objects = {shard.key: shard for shard in self.shards.values()}
        position = 0
        for extent in ShardPlaces(own, self.find).of(range(len(own.trailer.table))):
            assert extent.chunks.start == position
            position = extent.chunks.stop
            there = objects[extent.key]
            for chunk in extent.chunks:
                assert there.index is None or there.index.places[chunk] == 0
                assert there.trailer.table.digest(chunk) == own.trailer.table.digest(chunk)
        assert position == len(own.trailer.table)


def test_equal_ranks_store_each_block_once() -> None:
    values = list(range(4 * BLOCK_CHUNKS))
    step = saved(1, values, values, values, values)
    blocks = [[pack.stored_bytes for pack in step.packs if pack is not None]]
    full = BLOCK_CHUNKS * CHUNK
    assert blocks == [[full, full, full, full - 7]]


def test_a_replica_that_diverged_stores_what_differs() -> None:
    """Chunk 3 of rank 1 differs from that of rank 0, which owns the block."""
    values = list(range(2 * BLOCK_CHUNKS))
    other = [*values[:3], 99, *values[4:]]
    step = saved(1, values, other)
    assert step.packs[1].places[:5].tolist() == [1, 1, 1, 0, 1]


def test_a_sharded_state_is_stored_whole() -> None:
    assert saved(1, [1, 2, 3], [4, 5, 6]).packs == (None, None)
    assert saved(1, []).packs == (None,)


@pytest.mark.parametrize(("same", "packed"), [(1, False), (2, True)])
def test_less_than_an_eighth_is_not_worth_it(same: int, packed: bool) -> None:
    first = saved(1, list(range(16)))
    second = saved(2, [*range(same), *range(100, 116 - same)], base=first)
    assert (second.packs[0] is not None) is packed


def test_a_frozen_base_is_taken_from_where_it_is_stored() -> None:
    """The third save also refers to the original, because its base does not store the chunks either."""
    frozen = list(range(90))
    first = saved(1, [*frozen, *range(100, 110)])
    second = saved(2, [*frozen, *range(110, 120)], base=first)
    third = saved(3, [*frozen, *range(120, 130)], base=second, older=tuple(second.needs))
    assert third.packs[0].stored_bytes == 10 * CHUNK - 7
    assert third.needs == {first.checkpoint: 90 * CHUNK}


def test_what_may_not_be_referred_to_is_stored_again() -> None:
    first = saved(1, list(range(20)))
    second = saved(2, [*range(19), 100], base=first)
    assert saved(3, [*range(18), 100, 101], base=second).packs == (None,)


def test_tables_that_are_not_known_are_not_shared() -> None:
    values = list(range(3 * BLOCK_CHUNKS))
    step = saved(1, values, values, values, unknown={0: {1, 2}, 1: {2}})
    assert step.packs[0] is None
    places = step.packs[1].places
    assert [places[block * BLOCK_CHUNKS] for block in range(3)] == [1, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rank_of_every_step_can_be_restored(data: st.DataObject) -> None:
    """The chunks change in any way, ranks fail to answer, and the number of ranks varies. A restore needs
    at most MAX_EARLIER other checkpoints, and they are those that the plan names."""
    store, base, older = Store(), None, ()
    chunks = data.draw(st.integers(1, 40))
    value = st.integers(0, 2)
    state = data.draw(st.lists(value, min_size=chunks, max_size=chunks))
    for step in range(1, data.draw(st.integers(2, 7))):
        for chunk in data.draw(st.sets(st.integers(0, chunks - 1), max_size=4)):
            state[chunk] = data.draw(value)
        ranks = []
        for _ in range(data.draw(st.integers(1, 4))):
            own = list(state)
            for chunk in data.draw(st.sets(st.integers(0, chunks - 1), max_size=3)):
                own[chunk] = 7
            ranks.append(own)
        unknown = data.draw(
            st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 3)), max_size=2)
        )
        now = saved(step, *ranks, base=base, older=older, unknown=unknown)
        store.add(now)
        for trailer in now.trailers:
            store.asked.clear()
            store.restore(trailer.record.ref)
            needed = {ref.checkpoint for ref in store.asked} - {now.checkpoint}
            assert needed <= now.needs.keys()
        assert len(now.needs) <= MAX_EARLIER
        base = now
        older = most_needed(now.needs, MAX_EARLIER - 1)


def test_a_circle_of_references_is_refused() -> None:
    values = list(range(2 * BLOCK_CHUNKS))
    step = saved(1, values, values)
    store = Store()
    store.add(step)
    packs = [pack for pack in step.packs if pack is not None]
    for pack in packs:
        for chunk in range(len(pack.places)):
            pack.places[chunk] = 1
    with pytest.raises(CorruptionError, match="expected no second reference"):
        store.restore(step.trailers[0].record.ref)


def test_a_source_with_other_chunks_is_refused() -> None:
    values = list(range(2 * BLOCK_CHUNKS))
    step = saved(1, values, values)
    store = Store()
    store.add(step)
    liar = trailer_of(payload_of([50] * 32), step=1, rank=0, chunk_bytes=CHUNK)
    first = step.trailers[0].record.ref
    store.shards[first] = StoredShard("1/0", liar, 0, None)
    with pytest.raises(CorruptionError, match=r"are not those of 1/0"):
        store.restore(step.trailers[1].record.ref)


# ---------------------------------------------------------------------------- groups


def layout_of(
    rank: int, rows: tuple[int, int] = (0, 4), *, own: int = 8, name: str = "w", before: int = 0
) -> RankLayout:
    """Return a layout with some of a weight's 4 rows, between two tensors that only this rank has."""
    stop = before + (rows[1] - rows[0]) * 4
    tensors = {
        name: TensorSlice("F32", (4,), rows[:1], (rows[1] - rows[0],), ByteRange(before, stop))
    }
    for number, span in enumerate((ByteRange(0, before), ByteRange(stop, stop + own))):
        length = span.length_bytes
        if length:
            tensors[f"rng@rank{rank}~{number}"] = TensorSlice(
                "U8", (length,), (0,), (length,), span
            )
    return RankLayout(Rank(rank), tensors, {}, stop + own)


def groups_of(layouts: list[RankLayout]) -> tuple[tuple[Rank, ...], ...]:
    shards = shards_of(layouts)
    return tuple(dict.fromkeys(replica_group(shards, shard.rank) for shard in shards))


GROUPS = {
    "replicas": ([(0, 4)] * 12, ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),)),
    "sharded": ([(0, 2), (2, 4)], ((0,), (1,))),
    "hybrid": ([(0, 2), (2, 4), (0, 2), (2, 4)], ((0, 2), (1, 3))),
    "more than 64": ([(0, 4)] * 70, (tuple(range(64)), tuple(range(64, 70)))),
}


@pytest.mark.parametrize(("rows", "groups"), GROUPS.values(), ids=GROUPS.keys())
def test_ranks_with_the_same_layout_but_for_the_rank_are_a_group(
    rows: list[tuple[int, int]], groups: tuple[tuple[int, ...], ...]
) -> None:
    layouts = [layout_of(rank, span) for rank, span in enumerate(rows)]
    assert groups_of(layouts) == groups


def test_replicas_may_differ_behind_the_common_tensors_only() -> None:
    layouts = [layout_of(0), layout_of(1, own=9), layout_of(2, before=4), layout_of(3, own=0)]
    assert groups_of(layouts) == ((0, 1, 3), (2,))


def test_ranks_without_anything_in_common_are_alone() -> None:
    layouts = [layout_of(rank, name=f"w@rank{rank}") for rank in range(3)]
    assert groups_of(layouts) == ((0,), (1,), (2,))


def test_blocks_of_chunks_are_assigned_to_the_ranks_in_turn() -> None:
    group = (Rank(3), Rank(5))
    assert [owner(group, chunk) for chunk in (0, 15, 16, 31, 32)] == [3, 3, 5, 5, 3]


def test_the_references_with_the_most_bytes_are_kept() -> None:
    def at(step: int) -> CheckpointId:
        return trailer_of(b"x", step=step, rank=0).record.checkpoint

    needs = {at(1): 50, at(2): 70, at(3): 50, at(4): 1}
    assert most_needed(needs, 3) == (at(2), at(3), at(1))
