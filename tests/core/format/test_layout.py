from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.shards.builders import layout, rank_layout

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import merge_layouts, parse_layout
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Rank


def changed(document: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(document)
    change(value)
    return dumps_canonical(value)


def test_round_trips_are_exact() -> None:
    assert parse_rank_layout(rank_layout()).to_bytes() == rank_layout()
    assert parse_layout(layout()).to_bytes() == layout()


def test_merging_does_not_depend_on_the_order() -> None:
    documents = [rank_layout(rank=rank) for rank in range(4)]
    random.Random(1).shuffle(documents)
    assert merge_layouts(documents).to_bytes() == layout()


def test_the_merged_layout_knows_every_slice() -> None:
    merged = parse_layout(layout())
    weight = merged.tensors["weight"]
    assert weight.shape == (8, 3)
    assert [(s.rank, s.offsets, s.lengths) for s in weight.slices] == [
        (rank, (2 * rank, 0), (2, 3)) for rank in range(4)
    ]
    assert [place.rank for place in merged.objects["rng"]] == [0, 1, 2, 3]
    assert merged.ranks[2].layout == digest_of(rank_layout(rank=2))


@pytest.mark.parametrize(
    ("documents", "text"),
    [
        ([rank_layout(rank=0), rank_layout(rank=0)], "twice"),
        ([rank_layout(rank=0), rank_layout(rank=2)], "are not 0..1"),
        ([rank_layout(rank=0), rank_layout(rank=1, rows_per_rank=3)], "'weight' is F32"),
        ([], "empty"),
    ],
    ids=["double rank", "missing rank", "two shapes", "none"],
)
def test_layouts_that_contradict_each_other(documents: list[bytes], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        merge_layouts(documents).to_bytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["tensors"]["weight"].update(dtype="F33"), "dtype 'F33'"),
        (lambda m: m["tensors"]["weight"].update(offsets=[7, 0]), "axis 0 has the range 7..9"),
        (lambda m: m["tensors"]["weight"].update(offsets=[0]), "differ in their dimensions"),
        (lambda m: m["tensors"]["weight"].update(lengths=[1, 3]), "24 bytes, expected 12"),
        (lambda m: m["tensors"]["weight"].update(byteRange=[24, 0]), "not a byte range"),
        (lambda m: m["tensors"]["weight"].update(byteRange=[0, 2**63]), "expected 24"),
        (lambda m: m["tensors"]["weight"].update(byteRange=[-24, 0]), "not a byte range"),
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["ranks"].pop(), "not within 0..2"),
        (lambda m: m["tensors"]["weight"]["slices"].reverse(), "expected ranks in order"),
        (lambda m: m["tensors"]["weight"]["slices"][1].update(rank=0), "in order, once"),
        (lambda m: m["ranks"][1].update(payloadBytes=5), "of a payload of 5"),
        (lambda m: m["ranks"][1].update(layout="x"), "not a digest"),
        (lambda m: m["objects"].update(rng={}), "expected a list"),
    ],
)
def test_every_contradiction_of_the_whole_is_refused(
    change: Callable[[dict[str, Any]], object], text: str
) -> None:
    with pytest.raises(FormatError, match=text):
        parse_layout(changed(layout(), change))


def test_objects_may_share_one_range() -> None:
    value = json.loads(rank_layout())
    value["objects"]["scheduler"] = value["objects"]["rng"]
    parsed = parse_rank_layout(dumps_canonical(value))
    assert parsed.objects["scheduler"] == parsed.objects["rng"]
    assert parsed.rank == Rank(0)
