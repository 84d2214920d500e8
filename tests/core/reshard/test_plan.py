"""Plans compared with numpy: cut global arrays by any placement, save, plan, copy, and compare the bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shards.placements import Tensor, layout_of, objects_of, plan, planned, shards_of

from holdfast_core.errors import FormatError, NotFoundError, StateMismatchError
from holdfast_core.format.rank_layout import DTYPE_BYTES, RankLayout
from holdfast_core.ids import ByteRange, Rank
from holdfast_core.reshard.boxes import Box
from holdfast_core.reshard.plan import Move, home_of, payload_plan

Tensors = Mapping[str, Tensor]


def values(fqn: str, tensor: Tensor) -> np.ndarray:
    """Return the elements of the global tensor, each as its bytes."""
    size = DTYPE_BYTES[tensor.dtype]
    count = math.prod(tensor.shape)
    seed = sum(fqn.encode())
    data = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    return data.reshape((*tensor.shape, size))


def payload_of(layout: RankLayout, objects: bytes) -> np.ndarray:
    """Return what a rank with this layout saves, computed by numpy alone."""
    payload = np.zeros(layout.payload_bytes, dtype=np.uint8)
    head = payload_plan(layout).header
    payload[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    for fqn, item in layout.tensors.items():
        box = tuple(slice(o, o + n) for o, n in zip(item.offsets, item.lengths, strict=True))
        part = values(fqn, Tensor(item.dtype, item.shape))[box]
        payload[item.byte_range.start : item.byte_range.stop] = part.reshape(-1)
    (place,) = set(layout.objects.values())
    payload[place.start : place.stop] = np.frombuffer(objects, dtype=np.uint8)
    return payload


def payloads_of(layouts: Sequence[RankLayout]) -> list[np.ndarray]:
    return [payload_of(layout, objects_of(layout.rank)) for layout in layouts]


def executed(
    wanted: RankLayout, moves: Sequence[Move], payloads: Sequence[np.ndarray]
) -> np.ndarray:
    made = np.zeros(wanted.payload_bytes, dtype=np.uint8)
    written = np.zeros(wanted.payload_bytes, dtype=np.uint8)
    head = payload_plan(wanted).header
    made[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    written[: len(head)] = 1
    for move in moves:
        for i in range(move.times):
            start, target = move.start + i * move.start_step, move.target + i * move.target_step
            data = payloads[move.source][start : start + move.length_bytes]
            made[target : target + move.length_bytes] = data
            written[target : target + move.length_bytes] += 1
    assert (written == 1).all(), "every byte once"
    return made


def check(tensors: Tensors, old: Sequence[int], new: Tensors, mesh: Sequence[int]) -> None:
    n, m = math.prod(old), math.prod(mesh)
    source = [layout_of(tensors, old, rank) for rank in range(n)]
    payloads = payloads_of(source)
    for rank in range(m):
        wanted = layout_of(new, mesh, rank)
        moves = planned(wanted, source, m)
        expected = payload_of(wanted, objects_of(rank % n))
        assert (executed(wanted, moves, payloads) == expected).all()


def placed(tensors: Tensors, placement: Sequence[int | None] | None) -> dict[str, Tensor]:
    return {fqn: replace(tensor, placement=placement) for fqn, tensor in tensors.items()}


MODEL = {
    "w": Tensor("F32", (12, 8)),
    "b": Tensor("BF16", (12, 1)),
    "odd": Tensor("F64", (5, 3)),
    "mask": Tensor("BOOL", (7, 2)),
}
SCALAR = {"step": Tensor("I64", ()), "none": Tensor("F32", (0, 4))}


@pytest.mark.parametrize(
    ("old", "before", "new", "after"),
    [
        pytest.param([4], None, [2], None, id="replicated 4 to 2"),
        pytest.param([2], None, [5], None, id="replicated 2 to 5"),
        pytest.param([8], [0], [6], [0], id="rows 8 to 6"),
        pytest.param([6], [0], [8], [0], id="rows 6 to 8"),
        pytest.param([1], None, [4], [0], id="1 to 4"),
        pytest.param([4], [0], [1], None, id="4 to 1"),
        pytest.param([4], [0], [2], [1], id="rows to columns"),
        pytest.param([2], [1], [4], [0], id="columns to rows"),
        pytest.param([2, 2], [None, 0], [4], [0], id="replicas of rows to rows"),
        pytest.param([2, 2], [0, 1], [4], [1], id="tiles to columns"),
        pytest.param([2, 2], [0, 0], [3], [0], id="rows of rows to rows"),
        pytest.param([4], [0], [2, 3], [1, 0], id="rows to tiles"),
        pytest.param([13], [0], [2], [0], id="more ranks than rows"),
        pytest.param([3], [0], [13], [0], id="to more ranks than rows"),
    ],
)
def test_any_number_of_ranks(
    old: list[int], before: list[int | None], new: list[int], after: list[int | None]
) -> None:
    check({**placed(MODEL, before), **SCALAR}, old, {**placed(MODEL, after), **SCALAR}, new)


@st.composite
def meshes(draw: st.DrawFn, names: Sequence[tuple[str, Tensor]]) -> tuple[list[int], Tensors]:
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    tensors = {}
    for fqn, tensor in names:
        dimensions = [None, *range(len(tensor.shape))]
        placement = [draw(st.sampled_from(dimensions)) for _ in mesh]
        tensors[fqn] = replace(tensor, placement=placement)
    return mesh, tensors


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Tensors, list[int], Tensors]:
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    dtypes = st.sampled_from(["U8", "BF16", "F32", "C64"])
    tensors = draw(st.lists(st.builds(Tensor, dtypes, shapes), min_size=1, max_size=4))
    names = [(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    return (*draw(meshes(names)), *draw(meshes(names)))


@settings(deadline=None)
@given(cases())
def test_any_placement_to_any_other(case: tuple[list[int], Tensors, list[int], Tensors]) -> None:
    check(case[1], case[0], case[3], case[2])


@settings(deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_one_owner_of_each_box_is_enough(
    case: tuple[list[int], Tensors, list[int], Tensors], random: object
) -> None:
    """The sources are the shards that contain a box, and not the shard of the same rank."""
    old, tensors, mesh, new = case
    n = math.prod(old)
    layouts = [layout_of(tensors, old, rank) for rank in range(n)]
    holders: dict[tuple[str, Box], list[int]] = {}
    for layout in layouts:
        for fqn, item in layout.tensors.items():
            holders.setdefault((fqn, Box(item.offsets, item.lengths)), []).append(layout.rank)
    owners = {key: random.choice(ranks) for key, ranks in holders.items()}  # type: ignore[attr-defined]
    owned = []
    for layout in layouts:
        own = {
            fqn: replace(tensors[fqn], placement=tensors[fqn].placement)
            for fqn, item in layout.tensors.items()
            if owners[(fqn, Box(item.offsets, item.lengths))] == layout.rank
        }
        owned.append(layout_of(own, old, layout.rank))
    payloads = payloads_of(owned)
    for rank in range(math.prod(mesh)):
        wanted = layout_of(new, mesh, rank)
        made = executed(wanted, planned(wanted, owned, math.prod(mesh)), payloads)
        assert (made == payload_of(wanted, objects_of(rank % n))).all()


def test_the_same_ranks_and_placements_are_one_move() -> None:
    tensors = {**placed(MODEL, [0]), **SCALAR}
    source = [layout_of(tensors, [4], rank) for rank in range(4)]
    for rank in range(4):
        wanted = layout_of(tensors, [4], rank)
        head = len(payload_plan(wanted).header)
        assert planned(wanted, source, 4) == (
            Move(Rank(rank), head, wanted.payload_bytes - head, head),
        )


def test_columns_are_one_move_and_not_one_a_row() -> None:
    source = [layout_of({"w": Tensor("F32", (64, 8), [1])}, [4], r) for r in range(4)]
    wanted = layout_of({"w": Tensor("F32", (64, 8), [1])}, [2], 1)
    moves = [move for move in planned(wanted, source, 2) if move.times > 1]
    assert [(m.source, m.times, m.length_bytes, m.total_bytes) for m in moves] == [
        (2, 64, 8, 512),
        (3, 64, 8, 512),
    ]


@pytest.mark.parametrize(
    ("old", "before", "new", "after"),
    [
        pytest.param([4], [None], [8], [None], id="replicated 4 to 8"),
        pytest.param([8], [None], [4], [None], id="replicated 8 to 4"),
        pytest.param([2, 4], [None, 0], [8], [0], id="2 replicas of 4 to 8"),
        pytest.param([4, 2], [0, None], [8], [0], id="4 of 2 replicas to 8"),
        pytest.param([2, 2], [None, 0], [4, 2], [None, 0], id="more replicas"),
    ],
)
def test_equal_copies_serve_about_as_much(
    old: list[int], before: list[int | None], new: list[int], after: list[int | None]
) -> None:
    tensors = {"w": Tensor("F32", (64, 16), before)}
    n = math.prod(old)
    source = [layout_of(tensors, old, rank) for rank in range(n)]
    served: Counter[int] = Counter()
    for rank in range(math.prod(new)):
        wanted = layout_of({"w": Tensor("F32", (64, 16), after)}, new, rank)
        for move in planned(wanted, source, math.prod(new)):
            served[move.source] += move.total_bytes
    used = [served[rank] for rank in range(n) if served[rank]]
    assert len(used) == min(n, math.prod(new))
    assert max(used) == min(used)


def test_a_copy_that_cannot_be_read_is_avoided() -> None:
    tensors = {"w": Tensor("F32", (6, 2))}
    source = [layout_of(tensors, [3], rank) for rank in range(3)]
    wanted = layout_of(tensors, [4], 3)  # its preferred source is rank 0
    assert {move.source for move in planned(wanted, source, 4)} == {0}
    only = RankLayout(wanted.rank, wanted.tensors, {}, wanted.payload_bytes)
    assert {move.source for move in planned(only, source, 4, {Rank(0): "gone"})} == {2}
    with pytest.raises(
        NotFoundError,
        match=r"gone; without them: .*\n.*object state: expected it in the shard of rank 0",
    ):
        planned(wanted, source, 4, {Rank(0): "gone"})


def test_an_error_names_every_tensor() -> None:
    old = {
        "shape": Tensor("F32", (4, 2), [0]),
        "dtype": Tensor("F32", (4, 2), [0]),
        "fine": Tensor("F32", (4, 2), [0]),
    }
    source = [layout_of(old, [2], rank) for rank in range(2)]
    wanted = layout_of(
        {
            "shape": Tensor("F32", (4, 3)),
            "dtype": Tensor("F16", (4, 2)),
            "fine": Tensor("F32", (4, 2)),
            "new": Tensor("I8", (1,)),
        },
        [1],
        0,
    )
    with pytest.raises(StateMismatchError) as caught:
        planned(wanted, source, 1)
    assert str(caught.value).splitlines() == [
        "rank 0 cannot be assembled from the checkpoint of 2 ranks, in 3 places:",
        "  dtype: expected F16 [4, 2], found F32 [4, 2]",
        "  new: expected I8 [1], found nothing in the checkpoint",
        "  shape: expected F32 [4, 3], found F32 [4, 2]",
    ]


def test_a_part_that_no_shard_covers_is_named_with_its_place() -> None:
    tensors = {"a": Tensor("F32", (4, 2), [0]), "b": Tensor("F32", (4,), [0])}
    source = [layout_of(tensors, [4], rank) for rank in range(4)]
    wanted = layout_of(placed(tensors, None), [1], 0)
    with pytest.raises(NotFoundError) as caught:
        planned(wanted, source, 1, {Rank(2): "2 is gone", Rank(3): "3 is gone"})
    assert str(caught.value).splitlines()[1:] == [
        "  a: 4 of 8 elements are in no readable shard, the first at [2, 0] of [4, 2]",
        "  b: 2 of 4 elements are in no readable shard, the first at [2] of [4]",
    ]


def test_objects_come_from_the_same_rank_or_round_about() -> None:
    assert [home_of(Rank(r), 3) for r in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_wanted_layout_must_be_one_of_a_payload() -> None:
    good = layout_of(MODEL, [1], 0)
    assert payload_plan(good).total_bytes == good.payload_bytes
    item = good.tensors["w"]
    start, stop = item.byte_range.start, item.byte_range.stop
    moved = msgspec.structs.replace(item, byte_range=ByteRange(start + 4, stop + 4))
    with pytest.raises(FormatError, match="byte ranges are not those of a payload"):
        payload_plan(replace(good, tensors={**good.tensors, "w": moved}))
    with pytest.raises(FormatError, match="expected objects in 1 place, found 2"):
        payload_plan(replace(good, objects={**good.objects, "other": ByteRange(0, 1)}))


class Reading:
    """The layouts of a checkpoint, and which of them a plan has read."""

    def __init__(self, layouts: Sequence[RankLayout]) -> None:
        self._layouts = layouts
        self.shards = shards_of(layouts)
        self.read: list[int] = []

    def plan(self, wanted: RankLayout, world_size: int) -> tuple[Move, ...]:
        def layout(rank: Rank) -> RankLayout:
            self.read.append(rank)
            return self._layouts[rank]

        return plan(wanted, world_size, self.shards, layout)


def test_a_rank_of_rows_reads_only_layouts_near_its_own_rows() -> None:
    tensors = {f"w{i}": Tensor("F32", (512, 2), [0]) for i in range(4)}
    for rank in range(48):
        reading = Reading([layout_of(tensors, [64], old) for old in range(64)])
        reading.plan(layout_of(tensors, [48], rank), 48)
        assert len(reading.read) <= 8, (rank, reading.read)


def test_of_equal_replicas_one_layout_is_read() -> None:
    tensors = {"w": Tensor("F32", (8, 2)), "v": Tensor("F32", (3,))}
    reading = Reading([layout_of(tensors, [32], old) for old in range(32)])
    reading.plan(layout_of(tensors, [5], 3), 5)
    assert reading.read == [3]


def test_a_layout_whose_names_are_known_to_be_others_is_not_read() -> None:
    """Each of two pipeline stages has other tensors."""
    stages = [
        {f"stage{stage}": Tensor("F32", (16, 2), [0]), "both": Tensor("F32", (2,))}
        for stage in range(2)
    ]
    reading = Reading([layout_of(stages[old // 8], [8], old % 8, rank=old) for old in range(16)])
    wanted = layout_of({"stage0": Tensor("F32", (16, 2))}, [1], 0)
    reading.plan(wanted, 1)
    assert set(range(8)) <= set(reading.read)
    assert len(set(reading.read) & set(range(8, 16))) <= 1


@pytest.mark.fault("A layout of another rank or payload is sent")
def test_a_layout_of_another_rank_or_payload_is_refused() -> None:
    layouts = [layout_of({"w": Tensor("F32", (4,), [0])}, [2], rank) for rank in range(2)]
    wanted = layout_of({"w": Tensor("F32", (4,))}, [1], 0)
    with pytest.raises(FormatError, match="layout of rank 0: it is of rank 1"):
        plan(wanted, 1, shards_of(layouts), lambda rank: layouts[1])
    other = replace(layouts[0], payload_bytes=layouts[0].payload_bytes + 1)
    with pytest.raises(FormatError, match="expected"):
        plan(wanted, 1, shards_of(layouts), lambda rank: other)
