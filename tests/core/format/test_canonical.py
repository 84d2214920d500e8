from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_canonical, loads_strict

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
