"""Values of the script's own classes: enum members, named tuples, and subclasses of int, float and str.

A checkpoint holds such a value as built-in values, with the name of its class if it is an enum or a named
tuple. A restore never imports a class by that name. It finds the class among those of the current state, so
that a member comes back as a member where the state, or an object in it, has a value of that class. Without
such a class the value comes back as built-in values.

`torch.compile`, DistributedDataParallel and DataParallel put a module into another one, whose attribute
becomes a part of each name: `layer._orig_mod.weight`. A checkpoint has the names of the plain module, so that
it can be loaded, read and exported with and without the wrappers.

`Shared` marks objects whose tensors belong to all ranks together, although Holdfast does not know their
class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast_core.errors import StateMismatchError, UnsupportedStateError

_PLAIN = (type(None), bool, int, float, str, bytes)


def class_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_named_tuple(kind: type[Any]) -> bool:
    """Return whether it is a class made by collections.namedtuple or typing.NamedTuple."""
    return (
        issubclass(kind, tuple)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and callable(getattr(kind, "_make", None))
    )


def tuple_like(one: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """Return a tuple of the class of `one`, which may be a named tuple."""
    kind: Any = type(one)
    return kind._make(items) if is_named_tuple(kind) else tuple(items)


def is_plain(value: Any) -> bool:
    """Return whether an enum may have this value: a number, text, bytes, None, or a tuple of them."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def is_member(kind: type[Enum], plain: Any) -> bool:
    """Return whether a restore finds a member of the enum by this value."""
    try:
        kind(plain)
    except Exception:  # noqa: BLE001 - _missing_ is the script's own code
        return False
    return True


def without_class(value: Any) -> Any:
    """Return an enum member's value, and a subclass's int, float or str. Return other values unchanged."""
    if isinstance(value, Enum):
        return without_class(value.value)
    if type(value) in _PLAIN:
        return value
    # The subclass may define its own conversions.
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return str.__str__(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Classes:
    """Enums and named tuples by their names.

    With `strict`, a value that its class does not accept any more raises StateMismatchError. Otherwise it is
    returned without its class.
    """

    by_name: Mapping[str, type[Any] | None] = field(default_factory=dict)
    """None: two classes have this name."""
    strict: bool = True

    def member(self, name: str, value: Any) -> Any:
        """Return the member of the enum `name` that has this value, or the value if there is no such enum."""
        kind = self.by_name.get(name)
        if kind is None or not issubclass(kind, Enum):
            return value
        try:
            return kind(value)
        except Exception as error:  # _missing_ is the script's own code
            if not self.strict:
                return value
            raise StateMismatchError(
                f"the checkpoint holds {value!r} as a member of {name}, which has no such member now: "
                "add the member, or restore with strict=False to get the value itself"
            ) from error

    def named_tuple(self, name: str, fields: Sequence[str], items: Sequence[Any]) -> Any:
        """Return a named tuple of class `name`, or a plain tuple if there is no such class."""
        values = dict(zip(fields, items, strict=True))
        kind = self.by_name.get(name)
        if kind is None or not is_named_tuple(kind):
            return tuple(items)
        expected: tuple[str, ...] = kind._fields
        if values.keys() == set(expected):
            return kind._make(values[one] for one in expected)
        if not self.strict:
            return tuple(items)
        raise StateMismatchError(
            f"the checkpoint holds a {name} with the fields {', '.join(fields)}, expected "
            f"{', '.join(expected)}: give the class the saved fields, or restore with strict=False to "
            "get a plain tuple"
        )


NO_CLASSES = Classes()
"""For a reader that has no current state."""


_ATTRIBUTES = ("_orig_mod", "module")


def attribute_of(module: Any) -> str | None:
    """Return the name of the attribute with the module that this one wraps, or None if it is no wrapper."""
    import torch

    if "_orig_mod" in module._modules:
        return "_orig_mod"
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return "module"
    return None


def plain_names(module: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the plain name of each name of a tensor in the module.

    Names that would be the same, because a wrapper has parameters of its own, stay as they are.
    """
    own = list(names)
    if not any(one in _ATTRIBUTES for name in own for one in name.split(".")):
        return dict(zip(own, own, strict=True))  # the usual case, without a visit of all submodules
    inner = {
        f"{path}.{attribute}" if path else attribute
        for path, one in module.named_modules(remove_duplicate=False)
        if (attribute := attribute_of(one)) is not None
    }
    plain = [_without(name, inner) for name in own]
    count = Counter(plain)
    return {
        name: short if count[short] == 1 else name for name, short in zip(own, plain, strict=True)
    }


def plain_state(module: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return what the module's state_dict has returned, with plain names."""
    names = plain_names(module, state)
    if all(name == plain for name, plain in names.items()):
        return state
    return {names[name]: value for name, value in state.items()}


def _without(name: str, inner: set[str]) -> str:
    """Return a name without the parts that lead from a wrapper to what it wraps."""
    path, kept = "", []
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in inner:
            kept.append(part)
    return ".".join(kept)


class Shared:
    """An object with state_dict and load_state_dict whose tensors belong to all ranks together.

    stateful: the object, such as a container of models.

    Put it into the state as `{"model": holdfast.Shared(container)}`. Without it, the tensors of an object
    that is neither a module nor an optimizer belong to one rank. In a Shared object, tensors of the same name
    are the same tensor on every rank: equal copies are stored once, and DTensors are restored on another
    number of ranks. Values that are no tensors stay those of each rank.

    The object's own load_state_dict loads what was saved. The tensors of its state_dict are not written
    before that. Raises UnsupportedStateError for an object without these methods.
    """

    def __init__(self, stateful: Any) -> None:
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(stateful, name, None)):
                raise UnsupportedStateError(
                    f"Shared: expected an object with state_dict and load_state_dict, and "
                    f"{type(stateful).__qualname__} has no {name}"
                )
        self.stateful = stateful
        """The object that was passed in."""

    def state_dict(self) -> Any:
        """Return the state_dict of the object."""
        return self.stateful.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        """Call the object's load_state_dict."""
        return self.stateful.load_state_dict(state)
