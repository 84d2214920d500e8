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
  {"$held": [class, v]}   the result of the state_dict of an object in another object's state_dict
  {"$size": [...]}        a torch.Size
  {"$enum": [class, v]}   a member of an enum, as its value
  {"$named": [class, [field, ...], [...]]} a named tuple
  {"$bytes": base64}      bytes; "$bytearray": a bytearray
  {"$str": hex}           a str that UTF-8 cannot encode (lone surrogates)
  {"$int": hex}           an int with more digits than Python parses from text
  {"$float": hex}         NaN and the infinities, as the 8 bytes of the double
  {"$numpy": [dtype, hex]} a numpy scalar
Other subclasses of int, float and str are encoded as the int, float or str. Pickle is not used. A type that
is not listed here raises an error that names its path.
"""

from __future__ import annotations

import base64
import collections
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from holdfast.state.kinds import (
    NO_CLASSES,
    Classes,
    Shared,
    attribute_of,
    class_name,
    is_member,
    is_named_tuple,
    is_plain,
    plain_state,
    without_class,
)
from holdfast.state.optimizers import SavedOptimizer, kind_of
from holdfast.state.tensors import Leaf, is_tensor, make_leaf, torch_module
from holdfast_core.errors import (
    FormatError,
    HoldfastError,
    StateDictError,
    UnsupportedStateError,
)
from holdfast_core.format.canonical import dumps_canonical
from holdfast_core.format.payload import METADATA_NAME, OBJECTS_NAME
from holdfast_core.format.rank_layout import MAX_FQN, owner_of

STATE = "state"
METRICS = "metrics"
"""What rank 0 had reported when it saved: numbers by name. Only rank 0 has it, and not without a report."""
"""Key of the state in the objects of a payload."""
_MAX_PATH = MAX_FQN - 64
"""Characters of a path. The rest of a name is for what is appended to make it unique."""
_CUT = "$cut"
_CUTS = re.compile(rb'\{"\$cut":(\d+)\}')
"""A mark of `Encoder.encode_state`. Text of a state cannot look like it: within JSON text its quotation marks
are escaped, and a dict with a key that starts with a dollar sign is a `$map`."""
_MAX_DEPTH = 200
_MAX_INT_BITS = 4096
"""Longest int to encode as a number. Python does not parse decimal text of more than 4,300 digits."""
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, str, tuple)
}
"""The default factories that can be saved."""


def is_stateful(value: object) -> bool:
    """Return whether `value` has state_dict and load_state_dict, as modules and optimizers have."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def unwrap(value: Any) -> Any:
    """Return the object inside Shared, and the module inside DistributedDataParallel or torch.compile.

    A checkpoint uses the names of that module, so that it can be loaded with and without the wrapper.
    """
    while isinstance(value, Shared):
        value = value.stateful
    torch = torch_module()
    if torch is None or not isinstance(value, torch.nn.Module):
        return value
    while (attribute := attribute_of(value)) is not None:
        value = getattr(value, attribute)
    return value


def _state_dict_of(value: Any, path: str) -> Any:
    """Call `value.state_dict()`. Raises StateDictError for any exception of the object's own code."""
    try:
        state = value.state_dict()
        torch = torch_module()
        is_module = torch is not None and isinstance(value, torch.nn.Module)
        return plain_state(value, state) if is_module and isinstance(state, dict) else state
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
        """Return `value.state_dict()`, with plain names if it is a module (`state.kinds`).

        Raises StateDictError for any exception of the object's own code.
        """
        found = self._found.get(path)
        if found is None or found[0] is not value:  # two objects may have the same path
            found = self._found[path] = value, _state_dict_of(value, path)
        return found[1]


def has_parts(value: Any, depth: int = 0) -> bool:
    """Return whether a value contains a tensor, an array or an object with a state_dict.

    Also returns True for a value that is nested too deeply to be encoded.
    """
    if is_tensor(value) or isinstance(value, np.ndarray) or is_stateful(value):
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return depth > _MAX_DEPTH or any(has_parts(item, depth + 1) for item in value)


@dataclass(frozen=True, slots=True)
class StateText:
    """The canonical JSON of a state, cut at the values without tensors."""

    segments: tuple[bytes, ...]
    order: tuple[int, ...]
    """For each gap between two segments the number of its value, in the order in which the encoder visits
    them. The text has the parts of the state sorted by name."""

    def fill(self, values: Sequence[bytes]) -> bytes:
        """Return the text with the canonical JSON of these values."""
        pieces = [self.segments[0]]
        for number, segment in zip(self.order, self.segments[1:], strict=True):
            pieces += (values[number], segment)
        return b"".join(pieces)


def _expect_name(path: str) -> None:
    """Raise UnsupportedStateError if a tensor at this path would have a name that the format reserves."""
    if not is_text(path) or "\0" in path or len(path) > _MAX_PATH:
        raise UnsupportedStateError(
            f"{path[:200]!r}: the keys down to a tensor become its name: expected at most {_MAX_PATH} "
            "characters that UTF-8 can encode, without NUL"
        )
    if path in (OBJECTS_NAME, METADATA_NAME) or owner_of(path) is not None:
        raise UnsupportedStateError(
            f"{path}: a tensor cannot have this name: {OBJECTS_NAME}, {METADATA_NAME} and names that end "
            "in '@rank<number>' are reserved; use another key"
        )


def is_text(value: str) -> bool:
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


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose the tensors are that the encoder finds at a place of the state."""

    is_rank: bool
    """They belong to this rank, not to the gang."""
    has_own_code: bool = False
    """An object that is neither a module nor an optimizer loads them."""
    is_shared: bool = False
    """They are in a Shared object. All that it contains belongs to the gang."""

    def of_object(self, *, is_shared: bool, has_own_code: bool) -> _Owner:
        """Return the owner of the tensors of an object at this place."""
        is_shared = self.is_shared or (is_shared and not self.is_rank)
        return _Owner(
            self.is_rank or (has_own_code and not is_shared),
            self.has_own_code or has_own_code,
            is_shared,
        )


@dataclass(slots=True)
class Encoder:
    """Collects the leaves of one state and encodes the rest as JSON values.

    Tensors of models, optimizers, plain containers and Shared objects belong to the gang: the same name on
    every rank means the same tensor. Tensors of other objects (generators, data loaders) belong to one rank,
    whose number is part of their name.
    """

    rank: int = 0
    state_dicts: StateDictCache = field(default_factory=StateDictCache)
    cuts: list[bytes] | None = None
    """Canonical JSON of the values without tensors. None where the text is not cut at them."""
    leaves: list[Leaf] = field(default_factory=list)
    modules: list[tuple[str, Any]] = field(default_factory=list)
    """Each module, after its path in the state."""
    optimizers: list[Any] = field(default_factory=list)
    classes: dict[str, type[Any] | None] = field(default_factory=dict)
    """Enums and named tuples of the state by name. None: two classes have this name."""
    _names: set[str] = field(default_factory=set)
    _owner: _Owner = _Owner(is_rank=False)
    _optimizer: Any | None = None
    _owned: str = ""
    _is_held: bool = False
    """Whether an object at this place is in the state_dict of another object."""

    def encode_state(self, state: Mapping[str, Any]) -> StateText:
        """Return the canonical JSON of a whole state, without its values, which are `cuts` then.

        Raises what `encode` raises, and FormatError where JSON cannot hold a value.
        """
        self.cuts = []
        text = dumps_canonical(
            {STATE: {key: self.encode(part, key) for key, part in state.items()}}
        )
        parts = _CUTS.split(text)
        return StateText(tuple(parts[0::2]), tuple(map(int, parts[1::2])))

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return `value` as JSON.

        Raises UnsupportedStateError that names the path of a value that cannot be saved, and
        StateDictError where an object's state_dict fails.
        """
        if depth > _MAX_DEPTH:
            raise UnsupportedStateError(f"{path[:200]}: nested deeper than {_MAX_DEPTH}")
        if is_stateful(value):
            return self._object(value, path, depth)
        if is_tensor(value) or isinstance(value, np.ndarray):
            return self._reference(value, path)
        if self.cuts is not None and not has_parts(value, depth):
            self.cuts.append(dumps_canonical(self._uncut(value, path, depth)))
            return {_CUT: len(self.cuts) - 1}
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() <= _MAX_INT_BITS else {"$int": hex(value)}
        if kind is str:
            return value if is_text(value) else {"$str": _surrogates(value)}
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
        return self._of_own_class(value, path, depth)

    def _of_own_class(self, value: Any, path: str, depth: int) -> Any:
        """Encode a value of a class that is neither built in nor of torch or numpy."""
        kind = type(value)
        if isinstance(value, Enum):
            plain = without_class(value)
            if not is_plain(plain) or not is_member(kind, plain):
                raise UnsupportedStateError(
                    f"{path}: {value!r} cannot be saved: expected an enum whose values are numbers, "
                    "text, bytes, None, or tuples of them; save the member's name"
                )
            return {"$enum": [self._name(kind), self.encode(plain, path, depth + 1)]}
        if is_named_tuple(kind):
            items = self._items(value, path, depth)
            return {"$named": [self._name(kind), list(kind._fields), items]}
        plain = without_class(value)
        if type(plain) in (int, float, str):
            return self.encode(plain, path, depth + 1)
        raise UnsupportedStateError(
            f"{path}: {kind.__module__}.{kind.__qualname__} cannot be saved; expected tensors, numpy "
            "arrays, None, bool, int, float, str, enums, bytes, list, tuple, named tuples, dict, "
            "OrderedDict, defaultdict, Counter, or an object with state_dict and load_state_dict"
        )

    def _name(self, kind: type[Any]) -> str:
        name = class_name(kind)
        if self.classes.setdefault(name, kind) is not kind:
            self.classes[name] = None
        return name

    def _uncut(self, value: Any, path: str, depth: int) -> Any:
        cuts, self.cuts = self.cuts, None
        try:
            return self.encode(value, path, depth)
        finally:
            self.cuts = cuts

    def _object(self, value: Any, path: str, depth: int) -> Any:
        torch = torch_module()
        plain = unwrap(value)
        steps = torch is not None and isinstance(plain, torch.optim.Optimizer)
        is_module = torch is not None and isinstance(plain, torch.nn.Module)
        before = self._owner, self._optimizer, self._owned, self._is_held
        self._owner = self._owner.of_object(
            is_shared=isinstance(value, Shared), has_own_code=not (steps or is_module)
        )
        if is_module:
            self.modules.append((path, plain))
        if steps:
            self.optimizers.append(plain)
            # Its param_groups are not owned: a schedule writes a learning rate that is a tensor.
            self._optimizer, self._owned = plain, f"{path}.state."
        self._is_held, is_held = True, self._is_held
        try:
            content = self.state_dicts.call(plain, path)
            if is_module and isinstance(content, dict):
                # The type is OrderedDict, but a module can be loaded from any dict.
                encoded = self._dict(content, path, depth + 1)
            else:
                encoded = self.encode(content, path, depth + 1)
            if steps:
                encoded = {"$optimizer": [kind_of(plain), encoded]}
            return {"$held": [kind_of(plain), encoded]} if is_held else encoded
        finally:
            self._owner, self._optimizer, self._owned, self._is_held = before

    def _items(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        keys = list(value)
        plain = all(type(k) is str and not k.startswith("$") and is_text(k) for k in keys)
        if plain and keys == sorted(keys):
            return {k: self.encode(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
        return {"$map": self._pairs(value, path, depth)}

    def _factory(self, value: collections.defaultdict[Any, Any], path: str) -> str | None:
        if value.default_factory is None:
            return None
        for name, factory in FACTORIES.items():
            if value.default_factory is factory:
                return name
        raise UnsupportedStateError(
            f"{path}: a defaultdict whose default_factory is {value.default_factory!r}: only None and "
            f"{', '.join(FACTORIES)} can be saved; save dict(value)"
        )

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[Any]:
        pairs = []
        known: set[Any] = set()
        for key, item in value.items():
            encoded = plain = key
            if type(key) is not str or not is_text(key):  # nearly all keys are text
                if is_tensor(key) or isinstance(key, np.ndarray) or is_stateful(key):
                    raise UnsupportedStateError(f"{path}: a tensor as a key cannot be saved")
                encoded = self._uncut(key, f"{path}.<key>", depth + 1)
                plain = without_class(key)
            if plain in known:
                raise UnsupportedStateError(
                    f"{path}: two keys have the value {plain!r}, and would be one key where their "
                    "enums are not known: save a dict with the members' names as keys"
                )
            known.add(plain)
            pairs.append([encoded, self.encode(item, f"{path}.{plain}", depth + 1)])
        return pairs

    def _numpy_scalar(self, value: np.generic, path: str) -> Any:
        if value.dtype.kind not in "biufc":
            raise UnsupportedStateError(f"{path}: numpy scalar of dtype {value.dtype}")
        return {"$numpy": [value.dtype.name, value.tobytes().hex()]}

    def _reference(self, value: Any, path: str) -> Any:
        _expect_name(path)
        base = f"{path}@rank{self.rank}" if self._owner.is_rank else path
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
        has_own_code = self._owner.has_own_code
        is_private = has_own_code or (self._optimizer is not None and not is_kept)
        try:
            leaf, extra = make_leaf(
                name, value, path, owner, is_private=is_private, in_place=not has_own_code
            )
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise UnsupportedStateError(
                f"{path}: {type(value).__module__}.{type(value).__qualname__} cannot be saved: {error}"
            ) from error
        self.leaves.append(leaf)
        if leaf.whole is not None:
            extra["local"] = True
        return {"$tensor": name, **extra}


_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "$map": dict,
    "$odict": collections.OrderedDict,
    # Not Counter(pairs), which would count the pairs.
    "$counter": lambda pairs: collections.Counter(dict(pairs)),
}


@dataclass(frozen=True, slots=True)
class HeldState:
    """The saved state of an object that the `state_dict()` of another object held.

    A script's class often returns its attributes, such as a schedule in a schedule, and expects the objects
    among them in its `load_state_dict`. This mark lets a restore find them.
    """

    kind: str
    """Name of the object's class."""
    content: Any
    """Result of its state_dict."""


def content_of(saved: Any) -> Any:
    """Return the state of an object, whether or not another object held it."""
    return saved.content if isinstance(saved, HeldState) else saved


def has_held(saved: Any) -> bool:
    """Return whether a saved value contains the state of a held object."""
    if isinstance(saved, dict):
        return any(map(has_held, saved.values()))
    if isinstance(saved, list | tuple):
        return any(map(has_held, saved))
    return isinstance(saved, HeldState)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes JSON values. `resolve` returns the tensor or array of a reference."""

    resolve: Callable[[dict[str, Any]], Any]
    classes: Classes = NO_CLASSES
    """Classes that enum members and named tuples may have."""
    keeps_held: bool = False
    """Whether the state of a held object is returned as HeldState, and not as its content only."""

    def decode(self, value: Any) -> Any:
        """Return the Python value. Raises FormatError for invalid tags."""
        if isinstance(value, list):
            return [self.decode(v) for v in value]
        if not isinstance(value, dict):
            return value
        tag = "$tensor"
        if tag not in value:  # most of a large state are tensors
            found = next((k for k in value if k.startswith("$")), None)
            if found is None:
                return {k: self.decode(v) for k, v in value.items()}
            tag = found
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
        if tag == "$enum":
            name, member = body
            return self.classes.member(name, self.decode(member))
        if tag == "$named":
            name, fields, items = body
            return self.classes.named_tuple(name, fields, [self.decode(v) for v in items])
        if tag == "$defaultdict":
            name, pairs = body
            factory = None if name is None else FACTORIES[name]
            return collections.defaultdict(
                factory, ((self.decode(k), self.decode(v)) for k, v in pairs)
            )
        if tag == "$optimizer":
            kind, inner = body
            saved = SavedOptimizer(self.decode(inner))
            saved.kind = str(kind)
            return saved
        if tag == "$held":
            kind, inner = body
            content = self.decode(inner)
            return HeldState(str(kind), content) if self.keeps_held else content
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
