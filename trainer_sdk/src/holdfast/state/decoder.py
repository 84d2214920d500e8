"""Decodes the JSON of a state; `tree` describes it and encodes it."""

from __future__ import annotations

import base64
import collections
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.state.kinds import NO_CLASSES, Classes
from holdfast.state.optimizers import SavedOptimizer
from holdfast.state.tree import FACTORIES
from holdfast_core.errors import FormatError

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
