"""Encodes a nested state as JSON with references to tensors, and decodes it without any loss.

JSON has fewer types than Python. Other values are encoded as an object with a key that starts with a
dollar sign. Decoding restores the exact types: int keys, tuples and Counters are kept, and NaN keeps its
bits.

  {"$tensor": name, ...}  a tensor or array; "array", "dtype" and "local" describe it further
  {"$tuple": [...]}       a tuple
  {"$map": [[k, v], ...]} a dict whose keys are not plain strings in sorted order
  {"$odict": [[k, v], ...]} a collections.OrderedDict; "$counter": a collections.Counter
  {"$defaultdict": [factory, [[k, v], ...]]} with the name of a built-in type, or null
  {"$optimizer": [class, v]} the result of an optimizer's state_dict
  {"$size": [...]}        a torch.Size
  {"$bytes": base64}      bytes; "$bytearray": a bytearray
  {"$str": hex}           a str that UTF-8 cannot encode (lone surrogates)
  {"$int": hex}           an int with more digits than Python parses from text
  {"$float": hex}         NaN and the infinities, as the 8 bytes of the double
  {"$numpy": [dtype, hex]} a numpy scalar
Pickle is not used. A type that is not listed here raises an error that names its path.
"""

from __future__ import annotations

import base64
import collections
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.state.optimizers import SavedOptimizer, kind_of
from holdfast.state.tensors import Leaf, is_tensor, make_leaf, torch_module
from holdfast_core.errors import (
    FormatError,
    HoldfastError,
    StateDictError,
    UnsupportedStateError,
)
from holdfast_core.format.canonical import dumps_canonical

STATE = "state"
"""Key of the state in the objects of a payload."""
_MAX_DEPTH = 200
_MAX_INT_BITS = 4096
"""Longest int to encode as a number. Python does not parse decimal text of more than 4,300 digits."""
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, str, tuple)
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "$map": dict,
    "$odict": collections.OrderedDict,
    # Not Counter(pairs), which would count the pairs.
    "$counter": lambda pairs: collections.Counter(dict(pairs)),
}


def is_stateful(value: object) -> bool:
    """Return whether `value` has state_dict and load_state_dict, as modules and optimizers have."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def unwrap(value: Any) -> Any:
    """Return the module inside DistributedDataParallel, DataParallel or torch.compile.

    A checkpoint uses the names of that module, so that it can be loaded with and without the wrapper.
    """
    torch = torch_module()
    if torch is None or not isinstance(value, torch.nn.Module):
        return value
    while True:
        if isinstance(value, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            value = value.module
        elif hasattr(value, "_orig_mod"):
            value = value._orig_mod
        else:
            return value


def _state_dict_of(value: Any, path: str) -> Any:
    """Call `value.state_dict()`. Raises StateDictError for any exception of the object's own code."""
    try:
        return value.state_dict()
    except HoldfastError:
        raise
    except Exception as error:
        raise StateDictError(
            f"{path}: {type(value).__qualname__}.state_dict() raised {type(error).__name__}: {error}"
        ) from error


class StateDictCache:
    """Results of the state_dict calls of one snapshot. An object that is encoded twice is called once."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def call(self, value: Any, path: str) -> Any:
        """Return `value.state_dict()`. Raises StateDictError for any exception of the object's own code."""
        found = self._found.get(path)
        if found is None or found[0] is not value:  # two objects may have the same path
            found = self._found[path] = value, _state_dict_of(value, path)
        return found[1]


def _is_text(value: str) -> bool:
    """Return whether UTF-8 can encode `value`."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _surrogates(value: str) -> str:
    return value.encode(errors="surrogatepass").hex()


def _is_size(kind: type[Any]) -> bool:
    torch = torch_module()
    return torch is not None and kind is torch.Size


@dataclass(slots=True)
class Encoder:
    """Collects the leaves of one state and encodes the rest as JSON values.

    Tensors of models, optimizers and plain containers belong to the gang: the same name on every rank
    means the same tensor. Tensors of other objects (generators, data loaders) belong to one rank, whose
    number is part of their name.
    """

    rank: int = 0
    state_dicts: StateDictCache = field(default_factory=StateDictCache)
    marks: Mapping[str, str] = field(default_factory=dict)
    """Texts to encode in place of the values at these paths; see `template.Template`."""
    leaves: list[Leaf] = field(default_factory=list)
    modules: list[tuple[str, Any]] = field(default_factory=list)
    """Each module, after its path in the state."""
    optimizers: list[Any] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _rank_local: bool = False
    _optimizer: Any | None = None
    _owned: str = ""

    def encode_state(self, state: Mapping[str, Any]) -> bytes:
        """Return the canonical JSON of a whole state.

        Raises what `encode` raises, and FormatError where JSON cannot hold a value.
        """
        return dumps_canonical(
            {STATE: {key: self.encode(part, key) for key, part in state.items()}}
        )

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return `value` as JSON.

        Raises UnsupportedStateError that names the path of a value that cannot be saved, and
        StateDictError where an object's state_dict fails.
        """
        if depth > _MAX_DEPTH:
            raise UnsupportedStateError(f"{path[:200]}: nested deeper than {_MAX_DEPTH}")
        if is_stateful(value):
            return self._object(value, path, depth)
        if path in self.marks:
            return self.marks[path]
        if is_tensor(value) or isinstance(value, np.ndarray):
            return self._reference(value, path)
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() <= _MAX_INT_BITS else {"$int": hex(value)}
        if kind is str:
            return value if _is_text(value) else {"$str": _surrogates(value)}
        if kind is float:
            if math.isfinite(value):
                return value
            return {"$float": struct.pack(">d", value).hex()}
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": base64.b64encode(value).decode()}
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind is dict:
            return self._dict(value, path, depth)
        if kind is collections.OrderedDict:
            return {"$odict": self._pairs(value, path, depth)}
        if kind is collections.Counter:
            return {"$counter": self._pairs(value, path, depth)}
        if kind is collections.defaultdict:
            factory = self._factory(value, path)
            return {"$defaultdict": [factory, self._pairs(value, path, depth)]}
        if _is_size(kind):
            return {"$size": list(value)}
        raise UnsupportedStateError(
            f"{path}: {kind.__module__}.{kind.__qualname__} cannot be saved; expected tensors, numpy "
            "arrays, None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, defaultdict, "
            "Counter, or an object with state_dict and load_state_dict"
        )

    def _object(self, value: Any, path: str, depth: int) -> Any:
        torch = torch_module()
        steps = torch is not None and isinstance(value, torch.optim.Optimizer)
        shared = steps or (torch is not None and isinstance(value, torch.nn.Module))
        before = self._rank_local, self._optimizer, self._owned
        self._rank_local = self._rank_local or not shared
        plain = unwrap(value)
        if torch is not None and isinstance(plain, torch.nn.Module):
            self.modules.append((path, plain))
        if steps:
            self.optimizers.append(value)
            # Its param_groups are not owned: a schedule writes a learning rate that is a tensor.
            self._optimizer, self._owned = value, f"{path}.state."
        try:
            content = self.state_dicts.call(plain, path)
            if (
                torch is not None
                and isinstance(plain, torch.nn.Module)
                and isinstance(content, dict)
            ):
                # The type is OrderedDict, but a module can be loaded from any dict.
                return self._dict(content, path, depth + 1)
            encoded = self.encode(content, path, depth + 1)
            return {"$optimizer": [kind_of(plain), encoded]} if steps else encoded
        finally:
            self._rank_local, self._optimizer, self._owned = before

    def _items(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        keys = list(value)
        plain = all(type(k) is str and not k.startswith("$") and _is_text(k) for k in keys)
        if plain and keys == sorted(keys):
            return {k: self.encode(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
        return {"$map": self._pairs(value, path, depth)}

    def _factory(self, value: collections.defaultdict[Any, Any], path: str) -> str | None:
        if value.default_factory is None:
            return None
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return name
        raise UnsupportedStateError(
            f"{path}: a defaultdict whose default_factory is {value.default_factory!r}: only None and "
            f"{', '.join(_FACTORIES)} can be saved; save dict(value)"
        )

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[Any]:
        pairs = []
        for key, item in value.items():
            if is_tensor(key) or isinstance(key, np.ndarray) or is_stateful(key):
                raise UnsupportedStateError(f"{path}: a tensor as a key cannot be saved")
            encoded = self.encode(key, f"{path}.<key>", depth + 1)
            pairs.append([encoded, self.encode(item, f"{path}.{key}", depth + 1)])
        return pairs

    def _numpy_scalar(self, value: np.generic, path: str) -> Any:
        if value.dtype.kind not in "biufc":
            raise UnsupportedStateError(f"{path}: numpy scalar of dtype {value.dtype}")
        return {"$numpy": [value.dtype.name, value.tobytes().hex()]}

    def _reference(self, value: Any, path: str) -> Any:
        base = f"{path}@rank{self.rank}" if self._rank_local else path
        name = base
        serial = 1
        while name in self._names:  # {"a": {"b.c": x}, "a.b": {"c": y}}
            serial += 1
            name = f"{base}~{serial}"
        self._names.add(name)
        owner = self._optimizer
        if owner is not None and not path.startswith(self._owned):
            owner = None
        # A load keeps only those tensors that are direct entries of a parameter's state.
        is_kept = owner is not None and path.removeprefix(self._owned).count(".") == 1
        is_private = self._rank_local or (self._optimizer is not None and not is_kept)
        try:
            leaf, extra = make_leaf(
                name, value, path, owner, is_private=is_private, in_place=not self._rank_local
            )
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise UnsupportedStateError(
                f"{path}: {type(value).__module__}.{type(value).__qualname__} cannot be saved: {error}"
            ) from error
        self.leaves.append(leaf)
        if leaf.whole is not None:
            extra["local"] = True
        return {"$tensor": name, **extra}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes JSON values. `resolve` returns the tensor or array of a reference."""

    resolve: Callable[[dict[str, Any]], Any]

    def decode(self, value: Any) -> Any:
        """Return the Python value. Raises FormatError for invalid tags."""
        if isinstance(value, list):
            return [self.decode(v) for v in value]
        if not isinstance(value, dict):
            return value
        tag = next((k for k in value if k.startswith("$")), None)
        if tag is None:
            return {k: self.decode(v) for k, v in value.items()}
        try:
            return self._tagged(tag, value[tag], value)
        except (TypeError, ValueError, KeyError, AttributeError, struct.error) as error:
            raise FormatError(f"state: {tag} is not well-formed: {error}") from error

    def _tagged(self, tag: str, body: Any, value: dict[str, Any]) -> Any:
        if tag == "$tensor":
            return self.resolve(value)
        if tag == "$tuple":
            return tuple(self.decode(v) for v in body)
        if tag in ("$map", "$odict", "$counter"):
            return _MAPPINGS[tag]((self.decode(k), self.decode(v)) for k, v in body)
        if tag == "$defaultdict":
            name, pairs = body
            factory = None if name is None else _FACTORIES[name]
            return collections.defaultdict(
                factory, ((self.decode(k), self.decode(v)) for k, v in pairs)
            )
        if tag == "$optimizer":
            kind, inner = body
            saved = SavedOptimizer(self.decode(inner))
            saved.kind = str(kind)
            return saved
        if tag == "$bytes":
            return base64.b64decode(body, validate=True)
        if tag == "$bytearray":
            return bytearray(base64.b64decode(body, validate=True))
        if tag == "$size":
            import torch

            return torch.Size(body)
        if tag == "$int":
            return int(body, 16)
        if tag == "$str":
            return bytes.fromhex(body).decode(errors="surrogatepass")
        if tag == "$float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
        if tag == "$numpy":
            name, data = body
            return np.frombuffer(bytes.fromhex(data), dtype=np.dtype(name))[0]
        raise FormatError(f"state: {tag} is not supported by this version")
