from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.shards.builders import rank_layout
from tests.support.shards.placements import Tensor, layout_of

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import digest_of, dumps_canonical
from holdfast_core.format.rank_layout import (
    LayoutDigests,
    RankLayout,
    TensorSlice,
    layout_digests,
    parse_rank_layout,
)
from holdfast_core.ids import ByteRange, Rank


def changed(document: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(document)
    change(value)
    return dumps_canonical(value)


def test_round_trips_are_exact() -> None:
    assert parse_rank_layout(rank_layout()).to_bytes() == rank_layout()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["tensors"]["weight"].update(dtype="F33"), "dtype 'F33'"),
        (lambda m: m["tensors"]["weight"].update(offsets=[7, 0]), "axis 0 has the range 7..9"),
        (lambda m: m["tensors"]["weight"].update(offsets=[0]), "differ in their dimensions"),
        (lambda m: m["tensors"]["weight"].update(lengths=[1, 3]), "24 bytes, expected 12"),
        (lambda m: m["tensors"]["weight"].update(byteRange=[24, 0]), "not a byte range"),
        (
            lambda m: m["tensors"]["weight"].update(byteRange=[0, 2**63]),
            r"byteRange\[1\]: Expected `int` <=",
        ),
        (
            lambda m: m["tensors"]["weight"].update(byteRange=[-24, 0]),
            r"byteRange\[0\]: Expected `int` >= 0",
        ),
        (lambda m: m["tensors"]["weight"].update(byteRange=[0, 8, 24]), r"\.byteRange: .*length 2"),
        (lambda m: m["tensors"]["weight"].update(shape=[8.0, 3]), r"\.shape\[0\]: .*`int`"),
        (lambda m: m["tensors"]["weight"].update(extra=1), "unknown field"),
        (lambda m: m["tensors"]["weight"].pop("shape"), "required field `shape`"),
        (lambda m: m["objects"]["rng"].update(byteRange=[5, 4]), "not a byte range"),
        (lambda m: m.update(payloadBytes=2**51), "payloadBytes"),
        (lambda m: m["tensors"]["weight"].update(shape=[2**63 - 1, 3]), "dimension"),
        (
            lambda m: m["tensors"]["step"].update(
                byteRange=[m["tensors"]["weight"]["byteRange"][0]] * 1
                + [m["tensors"]["weight"]["byteRange"][0] + 8]
            ),
            "overlap",
        ),
        (lambda m: m.update(payloadBytes=10), "of a payload of 10"),
        (lambda m: m["objects"]["rng"].update(byteRange=[0, 10**9]), "overlap|of a payload"),
        (lambda m: m["tensors"].update({"": m["tensors"]["weight"]}), "characters"),
        (lambda m: m["tensors"].update({"a\0": m["tensors"]["weight"]}), "NUL"),
        (lambda m: m.update(rank=-1), "rank"),
        (lambda m: m.update(rank=10**6), "rank"),
        (lambda m: m.update(tensors=[]), r"tensors: Expected `object`"),
        (lambda m: m.update(formatVersion=2, more=1), "version 2 is not supported"),
        (lambda m: m.update(formatVersion=2), "version 2 is not supported"),
        (lambda m: m.update(formatVersion="1"), "formatVersion: expected a whole number"),
    ],
)
def test_every_contradiction_of_a_rank_is_refused(
    change: Callable[[dict[str, Any]], object], text: str
) -> None:
    with pytest.raises(FormatError, match=text):
        parse_rank_layout(changed(rank_layout(), change))


def test_objects_may_share_one_range() -> None:
    value = json.loads(rank_layout())
    value["objects"]["scheduler"] = value["objects"]["rng"]
    parsed = parse_rank_layout(dumps_canonical(value))
    assert parsed.objects["scheduler"] == parsed.objects["rng"]
    assert parsed.rank == Rank(0)


def test_digests_tell_what_ranks_have_in_common() -> None:
    first, second = (layout_digests(rank_layout(rank=rank)) for rank in range(2))
    assert first.layout == digest_of(rank_layout(rank=0)) != second.layout
    assert first.tensors == second.tensors
    assert first.boxes != second.boxes
    other = layout_digests(rank_layout(rank=0, world_size=5))
    assert other.tensors != first.tensors, "another global shape"


def test_what_belongs_to_one_rank_is_not_in_common() -> None:
    def of(rank: int, *more: str) -> LayoutDigests:
        tensors = {"w": Tensor("F32", (4, 2)), f"rng@rank{rank}": Tensor("U8", (16,))}
        return layout_digests(
            layout_of(
                {**tensors, **{name: Tensor("U8", (1,)) for name in more}}, [1], 0, rank=rank
            ).to_bytes()
        )

    assert (of(0).tensors, of(0).boxes) == (of(7).tensors, of(7).boxes)
    assert of(0, "more").tensors != of(0).tensors
    assert of(0).layout != of(7).layout


def test_ranks_without_a_tensor_of_the_gang_have_no_boxes_in_common() -> None:
    both = [
        layout_digests(
            layout_of({f"a@rank{rank}": Tensor("U8", (2,))}, [1], 0, rank=rank).to_bytes()
        )
        for rank in range(2)
    ]
    assert both[0].boxes != both[1].boxes


def test_a_layout_above_the_limit_is_refused_with_both_lengths() -> None:
    """The names alone exceed the limit."""
    tensors = {
        f"{number:05d}{'n' * 4000}": TensorSlice("U8", (0,), (0,), (0,), ByteRange(0, 0))
        for number in range(17_000)
    }
    layout = RankLayout(Rank(3), tensors, {}, 0)
    with pytest.raises(
        FormatError, match=rf"rank 3 with 17000 tensors: \d+ bytes, at most {64 << 20}"
    ):
        layout.to_bytes()
