"""Hostile inputs: mutated JSON and mutated bytes of valid inputs, and arbitrary bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

_LEAVES = (
    None,
    True,
    0,
    -1,
    1 << 31,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 64),
    10**400,
    1.5,
    -0.0,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "é" * 40,
    "../../etc/passwd",
    "b3:" + "0" * 64,
    "x" * 5000,
    [],
    {},
    [[[[[[[[]]]]]]]],
    [0] * 300,
    {"": 0, "\ud800": 1},
)
_NUMBERS = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
_SPELLINGS = (
    {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False},
    {"separators": (",", ":")},
    {"indent": 1},
)


def inputs(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Generate each seed unchanged, seeds with one to three changes, and arbitrary bytes."""
    documents = [value for seed in seeds if (value := _json(seed)) is not None]
    kinds: list[st.SearchStrategy[bytes]] = [
        st.sampled_from(seeds),
        mutated_bytes(seeds),
        st.binary(max_size=200),
        st.integers(10, 3000).map(lambda depth: b"[" * depth + b"]" * depth),
    ]
    if documents:
        kinds += [mutated_json(documents), mutated_json(documents)]
    return st.one_of(kinds)


@st.composite
def mutated_json(draw: st.DrawFn, documents: list[Any]) -> bytes:
    value = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        value = _changed(draw, value)
    spelling = draw(st.sampled_from(_SPELLINGS))
    try:
        data = json.dumps(value, **spelling).encode()
    except UnicodeEncodeError:  # half a surrogate pair can only be written escaped
        data = json.dumps(value).encode()
    if draw(st.integers(0, 19)) == 0:
        data = data.replace(b"{", b'{"twice":1,"twice":2,', 1)
    return data


def _changed(draw: st.DrawFn, root: Any) -> Any:
    """Return `root` with one node replaced, removed, repeated, renamed or changed by a small amount."""
    places = _places(root)
    leaf = copy.deepcopy(draw(st.sampled_from(_LEAVES)))
    if not places or draw(st.integers(0, 19)) == 0:
        return leaf
    parent, key = draw(st.sampled_from(places))
    match draw(st.integers(0, 5)):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, list):
            parent.extend([parent[key]] * draw(st.integers(1, 50)))
        case 1:
            parent[draw(st.sampled_from(("", "x", "\ud800", "formatVersion")))] = parent.pop(key)
        case 2:
            parent[key] = copy.deepcopy(draw(st.sampled_from(places))[0])
        case 3 if type(parent[key]) is int:
            parent[key] += draw(st.sampled_from((-1, 1, 1 << 20)))
        case _:
            parent[key] = leaf
    return root


def _places(root: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of the first few hundred nodes below the root."""
    places: list[tuple[Any, Any]] = []
    stack = [root]
    while stack and len(places) < 400:
        node = stack.pop()
        if isinstance(node, dict):
            children = list(node.items())
        elif isinstance(node, list):
            children = list(enumerate(node))
        else:
            continue
        places.extend((node, key) for key, _ in children)
        stack.extend(child for _, child in children)
    return places


@st.composite
def mutated_bytes(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 5)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at:]
            case 2:
                del data[at : at + draw(st.integers(1, 40))]
            case 3:
                data[at:at] = draw(st.binary(max_size=20))
            case 4:
                width = draw(st.sampled_from((1, 2, 4, 8)))
                number = draw(st.sampled_from(_NUMBERS)) & ((1 << 8 * width) - 1)
                order = draw(st.sampled_from(("big", "little")))
                data[at : at + width] = number.to_bytes(width, order)
            case _:
                data[at:at] = data[:at][-64:]
    return bytes(data)


def _json(seed: bytes) -> Any:
    """Return the document of a seed, or None if the seed is no JSON."""
    try:
        value = json.loads(seed)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None
