"""Take snapshots of a state whose structure has not changed, without encoding all of it again.

A model with AdamW has thousands of tensors. `tree.Encoder` checks each of them and names it, which takes
longer than the copy of their bytes. Between two saves only bytes and some numbers change. `Template` records
the structure of one encoded state. At the next save it compares the structure, collects the tensors that are
in the same places now, and encodes again only the values that contain no tensor.

Everything that the encoder's result depends on is compared: the types and keys of containers, the identity
of modules and optimizers, and for each tensor its type, dtype, shape, strides, offset, device, layout and the
size of its storage. If anything differs, `collect` returns None and the state is encoded again in full.
"""

from __future__ import annotations

import marshal
import re
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from holdfast.state.tensors import Leaf, is_distributed, is_tensor
from holdfast.state.tree import Encoder, StateDictCache, is_stateful, unwrap
from holdfast_core.format.canonical import dumps_canonical

_MARSHAL_VERSION = 2
"""Later versions refer to repeated objects by their reference counts, so equal values may differ."""
_PURE = frozenset({type(None), bool, int, float, str})
_MARK = re.compile(rb'"\$mark-([0-9a-f]{32})"')
_TENSOR_FACTS = attrgetter("dtype", "shape", "device", "layout")
_ARRAY_FACTS = attrgetter("dtype", "shape", "strides")
_GLOBAL_FACTS = attrgetter("dtype", "shape", "placements", "device_mesh")


class _ChangedError(Exception):
    """The structure of the state is not that of the template."""


@dataclass(frozen=True, slots=True)
class StateContents:
    """What a snapshot consists of, taken with a template."""

    leaves: tuple[Leaf, ...]
    objects: bytes
    """Canonical JSON of everything other than tensors and arrays."""
    modules: tuple[tuple[str, Any], ...]
    optimizers: tuple[Any, ...]


@dataclass(slots=True)
class _Walk:
    """One walk over a state: what it has collected so far."""

    state_dicts: StateDictCache
    sources: list[tuple[Any, Any]]
    """The local tensor or array of each leaf, and its DTensor or None."""
    texts: list[bytes]
    """Canonical JSON of each value without tensors."""
    modules: list[tuple[str, Any]]
    optimizers: list[Any]


_Node = Callable[[Any, _Walk], None]
"""Compare one value with the template and add it to the walk. Raises _ChangedError."""


class Template:
    """The structure of one state. It keeps no tensor alive."""

    def __init__(self, root: _Node, leaves: list[tuple[Leaf, int | None]], text: _Text) -> None:
        self._root = root
        self._leaves = leaves
        """Each leaf without its data, and the position of its optimizer among those of the state."""
        self._text = text

    def collect(
        self, state: Mapping[str, Any], state_dicts: StateDictCache
    ) -> StateContents | None:
        """Return the state's present contents, or None if its structure has changed.

        `state_dicts` receives the results of the state_dict calls, so that an encoder need not repeat them.

        Raises what `Encoder.encode` raises for a value that cannot be saved, and StateDictError.
        """
        walk = _Walk(state_dicts, [], [], [], [])
        try:
            self._root(state, walk)
        except _ChangedError:
            return None
        leaves = tuple(
            leaf.at(source, whole, None if owner is None else walk.optimizers[owner])
            for (leaf, owner), (source, whole) in zip(self._leaves, walk.sources, strict=True)
        )
        objects = self._text.fill(walk.texts)
        return StateContents(leaves, objects, tuple(walk.modules), tuple(walk.optimizers))


def make_template(state: Mapping[str, Any], encoder: Encoder) -> Template | None:
    """Return a template of a state that was just encoded.

    Args:
        state: The state. It has not changed since.
        encoder: The encoder that has encoded it, part by part.

    Returns:
        None if the state has a structure that templates do not support. It is then encoded at each save.
    """
    builder = _Builder(encoder)
    root = builder.container(dict(state), "", -1) if type(state) is dict else None
    if root is None or builder.seen != len(encoder.leaves):
        return None
    text = builder.text(state)
    if text is None:
        return None
    numbers = {id(optimizer): number for number, optimizer in enumerate(encoder.optimizers)}
    leaves = [(leaf.at(None, None, None), numbers.get(id(leaf.owner))) for leaf in encoder.leaves]
    return Template(root, leaves, text)


@dataclass(frozen=True, slots=True)
class _Text:
    """The canonical JSON of a state, cut at the values without tensors."""

    segments: tuple[bytes, ...]
    order: tuple[int, ...]
    """For each gap between two segments the number of its value, in the order of the walk. The text has
    the keys of an object sorted, while the walk visits them as they are."""

    def fill(self, values: list[bytes]) -> bytes:
        pieces = [self.segments[0]]
        for number, segment in zip(self.order, self.segments[1:], strict=True):
            pieces += (values[number], segment)
        return b"".join(pieces)


class _Builder:
    """Builds the nodes of a template. It visits values in the order in which the encoder does."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._marks: dict[str, str] = {}
        """Mark in the JSON text for the value at each path. Paths of values without tensors only."""
        self._is_ambiguous = False
        self.seen = 0
        """Number of leaves so far."""

    def text(self, state: Mapping[str, Any]) -> _Text | None:
        """Return the state's text. Returns None if a value without tensors has the path of another value."""
        if self._is_ambiguous:
            return None
        marked = Encoder(
            self._encoder.rank, state_dicts=self._encoder.state_dicts, marks=self._marks
        )
        parts = _MARK.split(marked.encode_state(state))
        numbers = {mark: number for number, mark in enumerate(self._marks.values())}
        order = tuple(numbers[f"$mark-{part.decode()}"] for part in parts[1::2])
        # A mark also replaces other values at its path, with the marks that they contain.
        is_exact = sorted(order) == list(range(len(numbers)))
        return _Text(tuple(parts[0::2]), order) if is_exact else None

    def _node(self, value: Any, path: str, depth: int) -> _Node | None:
        if is_stateful(value):
            return self._object(value, path, depth)
        if is_tensor(value):
            self.seen += 1
            return _distributed(value) if is_distributed(value) else _tensor(value)
        if isinstance(value, np.ndarray):
            self.seen += 1
            return _array(value)
        if not _has_parts(value):
            return self._plain(value, path, depth)
        return self.container(value, path, depth)

    def container(
        self, value: Any, path: str, depth: int, *, is_module: bool = False
    ) -> _Node | None:
        """Return the node of a dict, list or tuple that contains tensors or objects with a state_dict."""
        kind = type(value)
        if kind in (dict, OrderedDict) or (is_module and isinstance(value, dict)):
            keys, items = list(value), list(value.values())
            if any(type(key) not in _PURE for key in keys):
                return None
        elif kind in (list, tuple):
            keys, items = list(range(len(value))), list(value)
        else:
            return None
        prefix = f"{path}." if path else ""
        nodes = []
        for key, item in zip(keys, items, strict=True):
            node = self._node(item, f"{prefix}{key}", depth + 1)
            if node is None:
                return None
            nodes.append(node)
        return _mapping(kind, keys, nodes) if isinstance(value, dict) else _sequence(kind, nodes)

    def _plain(self, value: Any, path: str, depth: int) -> _Node:
        self._is_ambiguous = self._is_ambiguous or path in self._marks
        self._marks[path] = f"$mark-{secrets.token_hex(16)}"
        rank, fingerprint, text = self._encoder.rank, None, b""

        def plain(value: Any, walk: _Walk) -> None:
            nonlocal fingerprint, text
            found = _fingerprint(value)
            if found is None or found != fingerprint:
                encoder = Encoder(rank)
                encoded = encoder.encode(value, path, depth)
                if encoder.leaves or encoder.state_dicts:
                    raise _ChangedError
                text = dumps_canonical(encoded)
                fingerprint = found if _is_pure(value) else None
            walk.texts.append(text)

        return plain

    def _object(self, value: Any, path: str, depth: int) -> _Node | None:
        inner = unwrap(value)
        content = self._encoder.state_dicts.call(inner, path)
        kind, is_module = type(value), any(one is inner for _, one in self._encoder.modules)
        is_optimizer = any(one is value for one in self._encoder.optimizers)
        if is_module and isinstance(content, dict):
            child = self.container(content, path, depth + 1, is_module=True)
        else:
            child = self._node(content, path, depth + 1)
        if child is None:
            return None
        try:
            same = _identity_of(value, inner) if is_module or is_optimizer else None
        except TypeError:  # a class without weak references
            return None

        def stateful(value: Any, walk: _Walk) -> None:
            if type(value) is not kind or (same is not None and not same(value)):
                raise _ChangedError
            if is_module:
                walk.modules.append((path, unwrap(value)))
            if is_optimizer:
                walk.optimizers.append(value)
            child(walk.state_dicts.call(unwrap(value), path), walk)

        return stateful


def _identity_of(value: Any, inner: Any) -> Callable[[Any], bool]:
    """Return whether a value is the same module or optimizer, without keeping that one alive."""
    outer_ref, inner_ref = weakref.ref(value), weakref.ref(inner)
    return lambda found: found is outer_ref() and unwrap(found) is inner_ref()


def _mapping(kind: type[Any], keys: list[Any], nodes: list[_Node]) -> _Node:
    kinds = list(map(type, keys))

    def mapping(value: Any, walk: _Walk) -> None:
        # 1 and True are equal keys, and are encoded differently.
        if type(value) is not kind or [*value] != keys or [*map(type, value)] != kinds:
            raise _ChangedError
        for node, item in zip(nodes, value.values(), strict=True):
            node(item, walk)

    return mapping


def _sequence(kind: type[Any], nodes: list[_Node]) -> _Node:
    def sequence(value: Any, walk: _Walk) -> None:
        if type(value) is not kind or len(value) != len(nodes):
            raise _ChangedError
        for node, item in zip(nodes, value, strict=True):
            node(item, walk)

    return sequence


def _tensor(first: Any) -> _Node:
    kind, same = type(first), _memory_check(first)
    # A device may read a tensor after the save has returned. A tensor of our own keeps its memory alive.
    is_kept = first.device.type != "cpu"

    def tensor(value: Any, walk: _Walk) -> None:
        if type(value) is not kind or not same(value):
            raise _ChangedError
        detach = is_kept or value.requires_grad
        walk.sources.append((value.detach() if detach else value, None))

    return tensor


def _distributed(first: Any) -> _Node:
    kind, facts, same = type(first), _GLOBAL_FACTS(first), _memory_check(first.to_local())

    def distributed(value: Any, walk: _Walk) -> None:
        if type(value) is not kind or _GLOBAL_FACTS(value) != facts:
            raise _ChangedError
        local = value.to_local().detach()
        if not same(local):
            raise _ChangedError
        walk.sources.append((local, value))

    return distributed


def _memory_check(first: Any) -> Callable[[Any], bool]:
    """Return whether another tensor has the same type of elements at the same places of its memory.

    A storage of the same size holds all elements of such a tensor. The encoder has checked that for the first
    one: a copy of elements that were freed would end the process.
    """
    facts, stride, offset = _TENSOR_FACTS(first), first.stride(), first.storage_offset()
    size = first.untyped_storage().nbytes()

    def same(value: Any) -> bool:
        try:
            return bool(
                _TENSOR_FACTS(value) == facts
                and value.stride() == stride
                and value.storage_offset() == offset
                and value.untyped_storage().nbytes() == size
            )
        except (RuntimeError, NotImplementedError):  # nested and lazy tensors lack some of them
            return False

    return same


def _array(first: np.ndarray[Any, Any]) -> _Node:
    kind, facts, writeable = type(first), _ARRAY_FACTS(first), first.flags.writeable

    def array(value: Any, walk: _Walk) -> None:
        if (
            type(value) is not kind
            or _ARRAY_FACTS(value) != facts
            or value.flags.writeable != writeable
        ):
            raise _ChangedError
        walk.sources.append((value, None))

    return array


def _has_parts(value: Any) -> bool:
    """Return whether a value contains a tensor, an array or an object with a state_dict."""
    if is_tensor(value) or isinstance(value, np.ndarray) or is_stateful(value):
        return True
    if isinstance(value, dict):
        return any(map(_has_parts, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_parts, value))


def _is_pure(value: Any) -> bool:
    """Return whether a value consists of exact built-in types that marshal tells apart."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_pure, value)) and all(map(_is_pure, value.values()))
    if kind in (list, tuple):
        return all(map(_is_pure, value))
    return kind in _PURE


def _fingerprint(value: Any) -> bytes | None:
    """Return bytes that are equal only for equal values of the same types; see `_is_pure`."""
    try:
        return marshal.dumps(value, _MARSHAL_VERSION)
    except ValueError:
        return None
