from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tests.support.shards.builders import pack_objects

from holdfast_core.errors import FormatError
from holdfast_core.format.payload import (
    OBJECTS_NAME,
    PayloadPlan,
    header_bytes,
    parse_payload,
    plan_payload,
    unpack_objects,
)

TENSORS = [
    ("flag", "BOOL", (3,)),
    ("weight", "F32", (2, 3)),
    ("half", "BF16", (5,)),
    ("count", "I64", ()),
    ("empty", "F32", (0, 4)),
]


def test_a_payload_is_a_safetensors_file(tmp_path: Path) -> None:
    plan = plan_payload(TENSORS, 100)
    data = bytearray(plan.total_bytes)
    data[: len(plan.header)] = plan.header
    count = plan.byte_range("count")
    data[count.start : count.stop] = struct.pack("<q", -7)
    weight = plan.byte_range("weight")
    data[weight.start : weight.stop] = struct.pack("<6f", *range(6))
    data[plan.objects.start : plan.objects.stop] = pack_objects({"epoch": 3}, 100)
    path = tmp_path / "payload.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == sorted([name for name, _, _ in TENSORS] + [OBJECTS_NAME])
        assert file.metadata() == {"format": "pt", "holdfast": "1"}
        assert file.get_tensor("count").item() == -7
        assert file.get_tensor("weight").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.get_tensor("half").shape == (5,)
        objects = bytes(file.get_tensor(OBJECTS_NAME).tolist())
    assert unpack_objects(objects) == {"epoch": 3}


def test_data_is_aligned_and_without_gaps() -> None:
    plan = plan_payload(TENSORS, 0)
    assert len(plan.header) % 64 == 0
    assert [t.fqn for t in plan.tensors] == ["count", "empty", "weight", "half", "flag"]
    assert plan.tensors[0].byte_range.start == len(plan.header)
    assert plan.objects.stop == plan.total_bytes


@given(st.permutations(TENSORS))
def test_the_plan_does_not_depend_on_the_order(tensors: list[Any]) -> None:
    assert plan_payload(tensors, 10) == plan_payload(TENSORS, 10)


@given(
    st.dictionaries(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
        ).filter(lambda name: name not in (OBJECTS_NAME, "__metadata__")),
        st.tuples(
            st.sampled_from(["F32", "BF16", "I64", "U8", "BOOL"]),
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
        max_size=6,
    ),
    st.integers(0, 200),
)
def test_every_plan_parses_back(tensors: dict[str, Any], capacity: int) -> None:
    plan = plan_payload([(name, *rest) for name, rest in tensors.items()], capacity)
    assert parse_payload(plan.header + b"anything", plan.total_bytes) == plan
    assert header_bytes(plan.header[:8], plan.total_bytes) == len(plan.header)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([("a", "F31", (1,))], "dtype 'F31'"),
        ([("a", "F32", (1,)), ("a", "I64", (1,))], "twice"),
        ([(OBJECTS_NAME, "U8", (1,))], "reserved"),
        ([("__metadata__", "U8", (1,))], "reserved"),
        ([("", "U8", (1,))], "characters"),
        ([("a", "U8", (-1,))], "not within"),
        ([("a", "U8", (2**40, 2**40))], "more than"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused(tensors: list[Any], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        plan_payload(tensors, 10)


def hostile(change: Callable[[dict[str, Any]], object]) -> tuple[bytes, int]:
    plan = plan_payload(TENSORS, 100)
    value = json.loads(plan.header[8:])
    change(value)
    return framed(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), plan)


def framed(text: bytes, plan: PayloadPlan) -> tuple[bytes, int]:
    """Return a header with this text in place of the plan's, and the payload's length with it."""
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + plan.total_bytes - len(plan.header)


@pytest.mark.fault("A shard, a manifest or a layout is hostile")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h: h["weight"].update(data_offsets=[0, 24]), "no gaps, no overlaps"),
        (lambda h: h["weight"].update(data_offsets=[8, 2**62]), "of 24 bytes"),
        (lambda h: h["weight"].update(data_offsets=[24, 8]), "not a byte range"),
        (lambda h: h["weight"].update(shape=[2**40, 2**40]), "more than"),
        (lambda h: h["weight"].update(shape=[True, 3]), "Expected `int`"),
        (lambda h: h["weight"].update(shape=[2, 3.5]), "Expected `int`"),
        (lambda h: h["weight"].update(extra=1), "unknown field"),
        (lambda h: h.pop("flag"), "no gaps|end at"),
        (lambda h: h.pop(OBJECTS_NAME), "end at"),
        (lambda h: h[OBJECTS_NAME].update(dtype="BOOL"), "not __holdfast_objects__"),
        (lambda h: h.pop("__metadata__"), "__metadata__"),
        (lambda h: h.update(flag=5), "Expected `object`"),
    ],
)
def test_hostile_headers_are_refused(change: Callable[[dict[str, Any]], object], text: str) -> None:
    head, total = hostile(change)
    with pytest.raises(FormatError, match=text):
        parse_payload(head, total)


@pytest.mark.fault("A payload header has another spelling")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"flag":', b' "flag":'),
        (b'"flag":', b'"\\u0066lag":'),
        (b'"flag":', b'"flag":{"data_offsets":[42,45],"dtype":"BOOL","shape":[3]},"flag":'),
    ],
    ids=["whitespace", "escape", "duplicate"],
)
def test_a_header_in_another_spelling_is_refused(old: bytes, new: bytes) -> None:
    plan = plan_payload(TENSORS, 100)
    text = plan.header[8:].rstrip()
    assert old in text
    head, total = framed(text.replace(old, new), plan)
    with pytest.raises(FormatError, match="canonical form"):
        parse_payload(head, total)


@pytest.mark.parametrize(
    ("head", "total"),
    [
        (b"", 0),
        (b"\xff" * 8, 2**50),
        (struct.pack("<Q", 100), 50),
        (struct.pack("<Q", 56) + b"{" * 56, 1000),
        (struct.pack("<Q", 3) + b"{} ", 1000),
        (struct.pack("<Q", 56) + b"\x80\x04" + b" " * 54, 64),
    ],
    ids=["empty", "huge", "too long", "no json", "not aligned", "pickle"],
)
def test_what_is_no_payload_is_refused(head: bytes, total: int) -> None:
    with pytest.raises(FormatError):
        parse_payload(head, total)


def test_tensors_that_do_not_change_come_last_of_their_size() -> None:
    names = [("a", "F32", (1,)), ("b", "F32", (1,)), ("c", "F32", (1,)), ("d", "BF16", (1,))]
    plan = plan_payload(names, 0, last={"a", "c"})
    assert [t.fqn for t in plan.tensors] == ["b", "a", "c", "d"]
