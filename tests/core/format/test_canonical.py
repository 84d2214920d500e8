from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_canonical, loads_strict
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, parse_rank_layout
from holdfast_core.ids import ByteRange, Rank

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_spelling() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"z": "é", "y": 2**63}}
    assert dumps_canonical(value) == (
        '{"a":{"y":9223372036854775808,"z":"é"},"b":[1,2.5,null,true]}'.encode()
    )


@given(JSON)
def test_round_trip(value: Any) -> None:
    data = dumps_canonical(value)
    assert loads_canonical(data, "value") == value
    assert dumps_canonical(loads_strict(data, "value")) == data


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1: 2}, {"a": {True: 1}}, b"x", "\ud800", {1, 2}, CYCLE],
    ids=["nan", "inf", "int key", "bool key", "bytes", "surrogate", "set", "cycle"],
)
def test_what_has_no_exact_spelling_is_refused(value: Any) -> None:
    with pytest.raises(FormatError):
        dumps_canonical(value)


@pytest.mark.fault("A shard, a manifest or a layout is hostile")
@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":2}',
        b"NaN",
        b"[Infinity]",
        b"\xef\xbb\xbf{}",
        b"\xff",
        b"[" * 100_000,
        b"{} x",
        b"",
        b"1" * 5000,
    ],
    ids=["duplicate", "nan", "inf", "bom", "utf8", "deep", "trailing", "empty", "huge int"],
)
def test_hostile_json_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="doc"):
        loads_strict(data, "doc")


@pytest.mark.parametrize("data", [b'{"a": 1}', b'{"b":1,"a":1}', b'"\\u0041"', b"1.0e0", b" 1"])
def test_other_spellings_are_refused(data: bytes) -> None:
    loads_strict(data, "doc")
    with pytest.raises(FormatError, match="canonical"):
        loads_canonical(data, "doc")


def test_size_is_bounded() -> None:
    with pytest.raises(FormatError, match="at most 3"):
        loads_strict(b'"ab"', "doc", limit_bytes=3)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: "\0" not in name
)


@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    """Draw a layout with any names, in any order."""
    tensors: dict[str, TensorSlice] = {}
    position = draw(st.integers(0, 2**40))
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        lengths = tuple(draw(st.lists(st.integers(0, 2**16), max_size=2)))
        offsets = tuple(draw(st.integers(0, 2**40)) for _ in lengths)
        shape = tuple(o + n for o, n in zip(offsets, lengths, strict=True))
        stop = position + 4 * math.prod(lengths)
        tensors[name] = TensorSlice("F32", shape, offsets, lengths, ByteRange(position, stop))
        position = stop
    objects = {
        name: ByteRange(position, position + 9) for name in draw(st.lists(NAMES, max_size=3))
    }
    return RankLayout(Rank(draw(st.integers(0, 10**6 - 1))), tensors, objects, position + 9)


def reference(layout: RankLayout) -> Any:
    """Return the JSON value of a layout as docs/format.md describes it."""
    return {
        "formatVersion": 1,
        "rank": layout.rank,
        "payloadBytes": layout.payload_bytes,
        "tensors": {
            name: {
                "dtype": item.dtype,
                "shape": list(item.shape),
                "offsets": list(item.offsets),
                "lengths": list(item.lengths),
                "byteRange": list(item.byte_range),
            }
            for name, item in layout.tensors.items()
        },
        "objects": {name: {"byteRange": list(place)} for name, place in layout.objects.items()},
    }


@given(layouts())
def test_layouts_have_the_bytes_that_the_general_encoder_writes(layout: RankLayout) -> None:
    document = layout.to_bytes()
    assert document == dumps_canonical(reference(layout))
    assert parse_rank_layout(document) == layout


@given(layouts(), st.data())
def test_layouts_in_any_other_spelling_are_refused(layout: RankLayout, data: st.DataObject) -> None:
    document = layout.to_bytes()
    value = reference(layout)
    other = data.draw(
        st.sampled_from(
            [
                json.dumps(value, sort_keys=True, ensure_ascii=False).encode(),
                json.dumps(value, separators=(",", ":"), sort_keys=True).encode(),
                json.dumps(
                    dict(reversed(value.items())), separators=(",", ":"), ensure_ascii=False
                ).encode(),
                document.replace(b'"formatVersion":1', b'"formatVersion":1.0'),
                document.replace(b'"formatVersion":1', b'"formatVersion":1,"formatVersion":1'),
                document.replace(b'"rank":', b'"rank":0,"rank":'),
                b" " + document,
                document + b"\n",
                b"\xef\xbb\xbf" + document,
            ]
        )
    )
    if other != document:
        with pytest.raises(FormatError, match="layout of a rank"):
            parse_rank_layout(other)


@pytest.mark.fault("A shard, a manifest or a layout is hostile")
@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"NaN", b"\xff", b"[" * 100_000, b"{" * 100_000, b'{"rank":NaN}'],
    ids=["empty", "list", "null", "nan", "utf8", "deep list", "deep object", "nan inside"],
)
def test_hostile_layouts_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="layout of a rank"):
        parse_rank_layout(data)


def test_a_name_that_is_not_unicode_is_refused() -> None:
    layout = RankLayout(Rank(0), {}, {"\ud800": ByteRange(0, 1)}, 1)
    with pytest.raises(FormatError, match="layout of rank 0 with 0 tensors: cannot be written"):
        layout.to_bytes()
