"""Values are encoded as JSON and decoded exactly. A value that cannot be encoded is an error with its
path."""

from __future__ import annotations

import enum
import json
import math
import struct
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.state.tree import Decoder, Encoder
from holdfast_core.errors import FormatError, UnsupportedStateError
from holdfast_core.format.canonical import dumps_canonical


def round_trip(value: Any) -> Any:
    encoder = Encoder()
    tree = encoder.encode(value, "x")
    stored = {leaf.name: leaf.source for leaf in encoder.leaves}
    text = dumps_canonical({"v": tree})
    return Decoder(lambda ref: stored[ref["$tensor"]]).decode(json.loads(text)["v"])


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
keys = (
    st.integers() | st.text(st.characters(codec="utf-8")) | st.tuples(st.integers(), st.text("ab$"))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_a_value_survives_a_round_trip(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(float("nan"), id="nan"),
        pytest.param(struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0], id="nan-payload"),
        pytest.param(-math.inf, id="infinity"),
        pytest.param(-0.0, id="negative-zero"),
        pytest.param(1 << 200, id="big"),
        pytest.param({2: 1, "2": 2}, id="int-and-text-keys"),
        pytest.param({"b": 1, "a": 2}, id="order"),
        pytest.param({"$tensor": "not one"}, id="looks-like-a-tag"),
        pytest.param({True: 1, None: 2}, id="other-keys"),
    ],
)
def test_an_unusual_value_survives_a_round_trip(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j)])
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value)
    assert back == value


def test_tensors_are_referred_to_by_path() -> None:
    encoder = Encoder()
    tree = encoder.encode({"a": [torch.ones(2), {0: np.zeros(3)}]}, "s")
    assert [leaf.name for leaf in encoder.leaves] == ["s.a.0", "s.a.1.0"]
    assert tree["a"][0] == {"$tensor": "s.a.0"}


def test_names_do_not_collide() -> None:
    encoder = Encoder()
    encoder.encode({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(2)}}, "s")
    assert [leaf.name for leaf in encoder.leaves] == ["s.a.b.c", "s.a.b.c~2"]


def test_the_name_of_a_rank_local_tensor_has_the_rank() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"seen": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    encoder = Encoder(rank=4)
    encoder.encode({"data": Loader(), "model": torch.nn.Linear(1, 1)}, "s")
    names = {leaf.name for leaf in encoder.leaves}
    assert names == {"s.data.seen@rank4", "s.model.weight", "s.model.bias"}


class Kind(enum.Enum):
    FLOAT = torch.float32


class Mode(enum.Enum):
    ONE = 1


class Outer(enum.Enum):
    INNER = Mode.ONE


@pytest.mark.parametrize(
    ("value", "path"),
    [
        pytest.param({"foo": object()}, r"optim\.foo: builtins\.object", id="object"),
        pytest.param([{1, 2}], r"optim\.0: builtins\.set", id="set"),
        pytest.param({"c": Kind.FLOAT}, r"optim\.c: .*Kind\.FLOAT", id="enum-of-objects"),
        pytest.param({"c": Outer.INNER}, r"optim\.c: .*Outer\.INNER", id="enum-of-an-enum"),
        pytest.param({1: 1, Mode.ONE: 2}, r"optim: two keys", id="keys-of-one-value"),
        pytest.param({"f": math.sin}, r"optim\.f: ", id="function"),
        pytest.param({"t": torch.ones(2).to_sparse()}, r"optim\.t: .*dense", id="sparse"),
        pytest.param({"t": np.array(["x"])}, r"optim\.t: .*numpy array", id="text-array"),
        pytest.param({"t": torch.empty(2, device="meta")}, r"optim\.t: .*meta", id="meta"),
        pytest.param(time.gmtime(), r"optim: time\.struct_time", id="other-tuple"),
    ],
)
def test_an_unsupported_value_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedStateError, match=path):
        Encoder().encode(value, "optim")


def test_a_value_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match="deeper"):
        Encoder().encode(loop, "x")


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param({"$unknown": 1}, id="unknown-tag"),
        pytest.param({"$bytes": "***"}, id="no-base64"),
        pytest.param({"$float": "00"}, id="short-float"),
        pytest.param({"$map": [[1]]}, id="no-pair"),
        pytest.param({"$map": [[[1], 2]]}, id="unhashable-key"),
        pytest.param({"$numpy": ["object", "00"]}, id="object-scalar"),
        pytest.param({"$tuple": 5}, id="no-list"),
        pytest.param({"$enum": 5}, id="no-member"),
        pytest.param({"$named": ["a.B", ["x"], []]}, id="no-items"),
    ],
)
def test_a_malformed_tag_is_refused(tree: Any) -> None:
    with pytest.raises(FormatError):
        Decoder(lambda _: None).decode(tree)
