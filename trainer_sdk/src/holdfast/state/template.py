"""Take snapshots of a state whose structure has not changed, without encoding all of it again.

A model with AdamW has thousands of tensors. `tree.Encoder` checks each of them and names it, which takes
longer than the copy of their bytes. Between two saves only bytes and some numbers change. `Template` records
the structure of one encoded state. At the next save it compares the structure, collects the tensors that are
in the same places now, and encodes again only the values that contain no tensor.

Everything that the encoder's result depends on is compared: the types and keys of containers, the identity
of modules and optimizers, and for each tensor its type, dtype, shape, device, strides, offset and the size of
its storage, which only strided tensors have. If anything differs, `collect` returns None and the state is
encoded again in full.

The walk over the state only collects the tensors. They are compared all at once afterwards: one call for each
fact of all tensors is twice as fast as a function of Python for each tensor.
"""

from __future__ import annotations

import marshal
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np

from holdfast.state.kinds import is_named_tuple
from holdfast.state.tensors import Leaf, box_attributes, held_box, is_distributed, is_tensor
from holdfast.state.tree import Encoder, StateDictCache, StateText, has_parts, is_stateful, unwrap
from holdfast_core.format.canonical import dumps_canonical

_MARSHAL_VERSION = 2
"""Later versions refer to repeated objects by their reference counts, so equal values may differ."""
_PURE = frozenset({type(None), bool, int, float, str})
_TENSOR_FACTS = attrgetter("dtype", "shape", "device", "requires_grad")
_ARRAY_FACTS = attrgetter("dtype", "shape", "strides")
_GLOBAL_FACTS = attrgetter("dtype", "shape", "placements", "device_mesh")


class _ChangedError(Exception):
    """The structure of the state is not that of the template."""


@dataclass(slots=True)
class Found:
    """What one walk over a state has found so far."""

    state_dicts: StateDictCache
    classes: dict[str, type[Any] | None]
    """See `Encoder.classes`."""
    sources: list[Any] = field(default_factory=list)
    """The tensor or array of each leaf, as in `Leaf.source`."""
    wholes: dict[int, Any] = field(default_factory=dict)
    """The DTensor of a leaf, by its position."""
    texts: list[bytes] = field(default_factory=list)
    """Canonical JSON of each value without tensors."""
    modules: list[tuple[str, Any]] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)


_Node = Callable[[Any, Found], None]
"""Compare one value with the template and add it to what was found. Raises _ChangedError."""


class Template:
    """The structure of one state. It keeps no tensor alive."""

    def __init__(
        self, state: Mapping[str, Any], encoder: Encoder, text: StateText, root: _Node
    ) -> None:
        """Record the state; see `make_template`. Raises _ChangedError if that is not possible."""
        numbers = {id(optimizer): number for number, optimizer in enumerate(encoder.optimizers)}
        self._root = root
        self._leaves = [
            (leaf.at(None, None, None), numbers.get(id(leaf.owner))) for leaf in encoder.leaves
        ]
        """Each leaf without its data, and the position of its optimizer among those of the state."""
        self._text = text
        self._classes = encoder.classes
        first = self._walk(state, encoder.state_dicts)
        if (len(first.sources), len(first.texts)) != (len(self._leaves), len(text.order)):
            raise _ChangedError
        self._tensors = _Tensors(first.sources)

    def collect(self, state: Mapping[str, Any], state_dicts: StateDictCache) -> Found | None:
        """Return the state's present contents, or None if its structure has changed.

        `state_dicts` receives the results of the state_dict calls, so that an encoder need not repeat them.

        Raises what `Encoder.encode` raises for a value that cannot be saved, and StateDictError.
        """
        try:
            found = self._walk(state, state_dicts)
            self._tensors.take(found.sources)
        except _ChangedError:
            return None
        return found

    def objects(self, found: Found) -> bytes:
        """Return the canonical JSON of everything other than tensors and arrays."""
        return self._text.fill(found.texts)

    def leaves(self, found: Found) -> tuple[Leaf, ...]:
        """Return the leaves of the state. A save of a state in host memory does not need them."""
        optimizers, wholes = found.optimizers, found.wholes
        return tuple(
            leaf.at(source, wholes.get(position), None if owner is None else optimizers[owner])
            for position, ((leaf, owner), source) in enumerate(
                zip(self._leaves, found.sources, strict=True)
            )
        )

    def _walk(self, state: Mapping[str, Any], state_dicts: StateDictCache) -> Found:
        found = Found(state_dicts, dict(self._classes))
        self._root(state, found)
        return found


def make_template(state: Mapping[str, Any], encoder: Encoder, text: StateText) -> Template | None:
    """Return a template of a state that was just encoded.

    Args:
        state: The state. It has not changed since.
        encoder: The encoder that has encoded it, part by part.
        text: What the encoder returned.

    Returns:
        None if the state has a structure that templates do not support. It is then encoded at each save.
    """
    root = _Builder(encoder).container(dict(state), "", -1) if type(state) is dict else None
    if root is None:
        return None
    try:
        return Template(state, encoder, text, root)
    except _ChangedError:
        return None


class _Tensors:
    """The facts of the tensors of a state that a save depends on.

    A storage of the same size holds all elements of a tensor with the same strides and offset. The encoder
    has checked that for the first one: a copy of elements that were freed would end the process.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        """Record the facts of these tensors, among which may be arrays."""
        self._is_tensor = list(map(is_tensor, sources))
        self._kinds = list(map(type, sources))
        self._facts = self._read(sources)
        # A device may read a tensor after the save has returned. A tensor of our own keeps its memory alive.
        self._to_detach = [
            position
            for position, source in enumerate(sources)
            if self._is_tensor[position] and not _is_plain_in_host_memory(source)
        ]

    def take(self, sources: list[Any]) -> None:
        """Compare the sources, and detach those that need it. Raises _ChangedError."""
        if list(map(type, sources)) != self._kinds or self._read(sources) != self._facts:
            raise _ChangedError
        for position in self._to_detach:
            sources[position] = sources[position].detach()

    def _read(self, sources: Sequence[Any]) -> list[list[Any]]:
        tensors = list(compress(sources, self._is_tensor))
        if not tensors:
            return []
        from torch import Tensor

        try:
            return [
                list(map(_TENSOR_FACTS, tensors)),
                list(map(Tensor.stride, tensors)),
                list(map(Tensor.storage_offset, tensors)),
                [storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)],
                [box_attributes(tensor) is None for tensor in tensors],
            ]
        except (RuntimeError, NotImplementedError) as error:  # nested and lazy tensors lack some
            raise _ChangedError from error


def _is_plain_in_host_memory(tensor: Any) -> bool:
    from torch import Tensor

    return type(tensor) is Tensor and not tensor.requires_grad and tensor.device.type == "cpu"


class _Builder:
    """Builds the nodes of a template. It visits values in the order in which the encoder does."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._mappings: dict[Any, _Node] = {}
        """Nodes of dicts that contain nothing but tensors. An optimizer has one for each parameter."""

    def _node(self, value: Any, path: str, depth: int) -> _Node | None:
        if is_stateful(value):
            return self._object(value, path, depth)
        if is_tensor(value):
            if is_distributed(value):
                return _distributed(value)
            return _tensor if box_attributes(value) is None else _boxed(value)
        if isinstance(value, np.ndarray):
            return _array(value)
        if not has_parts(value, depth):
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
        elif kind in (list, tuple) or is_named_tuple(kind):
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
        if not isinstance(value, dict):
            return _sequence(kind, nodes)
        if any(node is not _tensor for node in nodes):
            return _mapping(kind, keys, nodes)
        key = kind, *keys, *map(type, keys)
        return self._mappings.setdefault(key, _mapping_of_tensors(kind, keys))

    def _plain(self, value: Any, path: str, depth: int) -> _Node:
        rank, fingerprint, text = self._encoder.rank, None, b""

        def plain(value: Any, found: Found) -> None:
            nonlocal fingerprint, text
            marshalled = _fingerprint(value)
            if marshalled is None or marshalled != fingerprint:
                encoder = Encoder(rank, classes=found.classes)
                encoded = encoder.encode(value, path, depth)
                if encoder.leaves or encoder.state_dicts:
                    raise _ChangedError
                text = dumps_canonical(encoded)
                # A value that is not pure is encoded each time, so that its classes are found.
                fingerprint = marshalled if _is_pure(value) else None
            found.texts.append(text)

        return plain

    def _object(self, value: Any, path: str, depth: int) -> _Node | None:
        inner = unwrap(value)
        content = self._encoder.state_dicts.call(inner, path)
        kind, inner_kind = type(value), type(inner)
        is_module = any(one is inner for _, one in self._encoder.modules)
        is_optimizer = any(one is inner for one in self._encoder.optimizers)
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

        def stateful(value: Any, found: Found) -> None:
            inner = unwrap(value)
            if type(value) is not kind or type(inner) is not inner_kind:
                raise _ChangedError
            if same is not None and not same(value):
                raise _ChangedError
            if is_module:
                found.modules.append((path, inner))
            if is_optimizer:
                found.optimizers.append(inner)
            child(found.state_dicts.call(inner, path), found)

        return stateful


def _identity_of(value: Any, inner: Any) -> Callable[[Any], bool]:
    """Return whether a value is the same module or optimizer, without keeping that one alive."""
    outer_ref, inner_ref = weakref.ref(value), weakref.ref(inner)
    return lambda found: found is outer_ref() and unwrap(found) is inner_ref()


def _mapping(kind: type[Any], keys: list[Any], nodes: list[_Node]) -> _Node:
    same = _same_keys(kind, keys)

    def mapping(value: Any, found: Found) -> None:
        same(value)
        for node, item in zip(nodes, value.values(), strict=True):
            node(item, found)

    return mapping


def _mapping_of_tensors(kind: type[Any], keys: list[Any]) -> _Node:
    same = _same_keys(kind, keys)

    def tensors(value: Any, found: Found) -> None:
        same(value)
        found.sources.extend(value.values())

    return tensors


def _same_keys(kind: type[Any], keys: list[Any]) -> Callable[[Any], None]:
    """Return a function that raises _ChangedError for a dict of another type or with other keys."""
    kinds = list(map(type, keys))

    def same(value: Any) -> None:
        # 1 and True are equal keys, and are encoded differently.
        if type(value) is not kind or [*value] != keys or [*map(type, value)] != kinds:
            raise _ChangedError

    return same


def _sequence(kind: type[Any], nodes: list[_Node]) -> _Node:
    def sequence(value: Any, found: Found) -> None:
        if type(value) is not kind or len(value) != len(nodes):
            raise _ChangedError
        for node, item in zip(nodes, value, strict=True):
            node(item, found)

    return sequence


def _tensor(value: Any, found: Found) -> None:
    """Add a plain tensor, which `_Tensors` compares."""
    found.sources.append(value)


def _boxed(first: Any) -> _Node:
    kind, box, shape = type(first), held_box(first, "tensor"), first.shape

    def boxed(value: Any, found: Found) -> None:
        if type(value) is not kind or value.shape != shape:
            raise _ChangedError
        held = held_box(value, "tensor")
        if held is None or held != box:
            raise _ChangedError
        found.sources.append(held.within(value).detach())

    return boxed


def _distributed(first: Any) -> _Node:
    kind, facts = type(first), _GLOBAL_FACTS(first)

    def distributed(value: Any, found: Found) -> None:
        if type(value) is not kind or _GLOBAL_FACTS(value) != facts:
            raise _ChangedError
        found.wholes[len(found.sources)] = value
        found.sources.append(value.to_local().detach())

    return distributed


def _array(first: np.ndarray[Any, Any]) -> _Node:
    facts, writeable = _ARRAY_FACTS(first), first.flags.writeable

    def array(value: Any, found: Found) -> None:
        if (
            not isinstance(value, np.ndarray)
            or _ARRAY_FACTS(value) != facts
            or value.flags.writeable != writeable
        ):
            raise _ChangedError
        found.sources.append(value)

    return array


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
