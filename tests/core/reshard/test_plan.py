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
from tests.support.shards.placements import Tensor, layout_of, objects_of

from holdfast_core.errors import FormatError, StateMismatchError
from holdfast_core.format.dtypes import DTYPE_BYTES
from holdfast_core.format.layout import Layout, merge_layouts
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import ByteRange, Rank
from holdfast_core.reshard.boxes import Box
from holdfast_core.reshard.plan import Move, home_of, payload_plan, plan

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


def saved(layouts: Sequence[RankLayout]) -> tuple[Layout, list[np.ndarray]]:
    source = merge_layouts(layout.to_bytes() for layout in layouts)
    return source, [payload_of(layout, objects_of(layout.rank)) for layout in layouts]


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
    source, payloads = saved([layout_of(tensors, old, rank) for rank in range(n)])
    for rank in range(m):
        wanted = layout_of(new, mesh, rank)
        moves = plan(wanted, source)
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
    source, payloads = saved(owned)
    for rank in range(math.prod(mesh)):
        wanted = layout_of(new, mesh, rank)
        made = executed(wanted, plan(wanted, source), payloads)
        assert (made == payload_of(wanted, objects_of(rank % n))).all()


def test_the_same_ranks_and_placements_are_one_move() -> None:
    tensors = {**placed(MODEL, [0]), **SCALAR}
    source, _ = saved([layout_of(tensors, [4], rank) for rank in range(4)])
    for rank in range(4):
        wanted = layout_of(tensors, [4], rank)
        head = len(payload_plan(wanted).header)
        assert plan(wanted, source) == (Move(Rank(rank), head, wanted.payload_bytes - head, head),)


def test_columns_are_one_move_and_not_one_a_row() -> None:
    source, _ = saved([layout_of({"w": Tensor("F32", (64, 8), [1])}, [4], r) for r in range(4)])
    wanted = layout_of({"w": Tensor("F32", (64, 8), [1])}, [2], 1)
    moves = [move for move in plan(wanted, source) if move.times > 1]
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
    source, _ = saved([layout_of(tensors, old, rank) for rank in range(n)])
    served: Counter[int] = Counter()
    for rank in range(math.prod(new)):
        wanted = layout_of({"w": Tensor("F32", (64, 16), after)}, new, rank)
        for move in plan(wanted, source):
            served[move.source] += move.total_bytes
    used = [served[rank] for rank in range(n) if served[rank]]
    assert len(used) == min(n, math.prod(new))
    assert max(used) == min(used)


def test_a_copy_that_cannot_be_read_is_avoided() -> None:
    tensors = {"w": Tensor("F32", (6, 2))}
    source, _ = saved([layout_of(tensors, [3], rank) for rank in range(3)])
    wanted = layout_of(tensors, [4], 3)  # its preferred source is rank 0
    assert {move.source for move in plan(wanted, source)} == {0}
    only = RankLayout(wanted.rank, wanted.tensors, {}, wanted.payload_bytes)
    assert {move.source for move in plan(only, source, avoid={Rank(0)})} == {2}
    with pytest.raises(
        StateMismatchError, match="object state: expected it in the shard of rank 0"
    ):
        plan(wanted, source, avoid={Rank(0)})


def test_an_error_names_every_tensor() -> None:
    old = {
        "shape": Tensor("F32", (4, 2), [0]),
        "dtype": Tensor("F32", (4, 2), [0]),
        "fine": Tensor("F32", (4, 2), [0]),
    }
    source, _ = saved([layout_of(old, [2], rank) for rank in range(2)])
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
        plan(wanted, source)
    assert str(caught.value).splitlines() == [
        "rank 0 cannot be assembled from the checkpoint of 2 ranks, in 3 places:",
        "  dtype: expected F16 [4, 2], found F32 [4, 2]",
        "  new: expected I8 [1], found nothing in the checkpoint",
        "  shape: expected F32 [4, 3], found F32 [4, 2]",
    ]


def test_a_part_that_no_shard_covers_is_named_with_its_place() -> None:
    tensors = {"a": Tensor("F32", (4, 2), [0]), "b": Tensor("F32", (4,), [0])}
    source, _ = saved([layout_of(tensors, [4], rank) for rank in range(4)])
    wanted = layout_of(placed(tensors, None), [1], 0)
    with pytest.raises(StateMismatchError) as caught:
        plan(wanted, source, avoid={Rank(2), Rank(3)})
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
