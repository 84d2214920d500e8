"""Strict JSON codec for frozen dataclasses. Data from a peer is untrusted until it is decoded here.

Field names are snake_case in Python and camelCase on the wire. Unknown fields are ignored, because a
newer sender may send them. Wrong types and missing fields without a default are refused, and the error
names the path of the field. Every number, text, list and the depth are bounded (messages.bounds). The
codec does not depend on any particular message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any, TypeVar, Union

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import unique_keys
from holdfast_core.messages.bounds import OF_NEW_TYPE, Bounds, body_limit_bytes, entries_limit

T = TypeVar("T")

MAX_MESSAGE_BYTES = 1 << 20
"""Largest body of a frame on the pod's Unix socket."""
MAX_CONTROL_BYTES = 64 << 20
"""Largest body of any message over HTTPS."""
MAX_DEPTH = 32
"""Largest nesting depth of objects and lists, in unknown fields too."""
_PLAIN = Bounds()

Decoder = Callable[[Any], Any]


class _MismatchError(Exception):
    """Mismatch between a value and its type.

    Each decoder on the way out appends its part of `path`, so the innermost part comes first.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: list[str] = []


def camel(name: str) -> str:
    """Return the camelCase wire name of a snake_case field."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def to_json(message: Any) -> Any:
    """Return the JSON value of a message. Fields with the value None are left out."""
    kind: Any = type(message)
    if kind in _PLAIN_KINDS:
        return message
    if (names := _wire_names(kind)) is not None:
        values = ((wire, getattr(message, name)) for name, wire in names)
        return {wire: to_json(value) for wire, value in values if value is not None}
    if isinstance(message, dict):
        return {str(k): to_json(v) for k, v in message.items()}
    if isinstance(message, list | tuple):
        return [to_json(v) for v in message]
    return message


_PLAIN_KINDS = frozenset({str, int, float, bool, type(None)})


@functools.lru_cache(maxsize=2048)
def _wire_names(kind: Any) -> tuple[tuple[str, str], ...] | None:
    """Return the name of each field of a dataclass and its wire name, or None for another class."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple((field.name, camel(field.name)) for field in dataclasses.fields(kind))


_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


def dumps(message: Any) -> bytes:
    return json.dumps(to_json(message), separators=(",", ":"), allow_nan=True).encode()


def _entries(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def loads(cls: type[T], data: bytes, *, limit_bytes: int | None = None) -> T:
    """Parse bytes into a message.

    Args:
        limit_bytes: Largest body. None means the limit of this message in messages.bounds.

    Raises:
        FormatError: The bytes are not a valid message. The text names the message, the path of the
            field and the reason.
    """
    entries = entries_limit(cls, len(data))
    # Texts contain brackets, too. They are left out only if the fast count is too high.
    if (
        entries is not None
        and _entries(data) > entries
        and _entries(_TEXT.sub(b"", data)) > entries
    ):
        raise FormatError(
            f"{cls.__name__}: more than {entries} objects and lists in {len(data)} bytes"
        )
    return from_json(cls, parse_json(data, cls.__name__, limit_bytes or body_limit_bytes(cls)))


def parse_json(data: bytes, what: str, limit_bytes: int) -> Any:
    """Parse `data` as JSON.

    Args:
        what: Name of the document, for error texts.
        limit_bytes: Largest size of `data`.

    Raises:
        FormatError: `data` is too large, nested too deeply, not JSON, or repeats a key.
    """
    if len(data) > limit_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, at most {limit_bytes} are accepted")
    try:
        value = json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not valid JSON: {error}") from error
    if _is_too_deep(value):
        raise FormatError(f"{what}: more than {MAX_DEPTH} objects and lists within one another")
    return value


def from_json(cls: type[T], value: Any) -> T:
    """Decode a parsed JSON value into a message. Raises FormatError."""
    kind: Any = cls
    try:
        return typing.cast(T, _decoder(kind)(value))
    except _MismatchError as error:
        path = "".join(reversed(error.path))
        raise FormatError(f"{cls.__name__}{path}: {error.text}") from error


def _is_too_deep(value: Any) -> bool:
    level = _containers((value,))
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            child
            for item in level
            for child in _containers(item.values() if type(item) is dict else item)
        ]
    return bool(level)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [v for v in values if type(v) is dict or type(v) is list]


@functools.lru_cache(maxsize=2048)
def _decoder(kind: Any, bounds: Bounds = _PLAIN) -> Decoder:
    """Return the decoder of a type. Decoders are cached. Raises TypeError for an unsupported type."""
    while hasattr(kind, "__supertype__"):  # NewType
        bounds = OF_NEW_TYPE.get(kind, bounds)
        kind = kind.__supertype__
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *notes = typing.get_args(kind)
        return _decoder(inner, next((n for n in notes if isinstance(n, Bounds)), bounds))
    if origin in (Union, types.UnionType):
        return _optional(kind, bounds)
    if origin is tuple:
        return _list(_decoder(typing.get_args(kind)[0]), bounds)
    if origin is dict:
        key, item = typing.get_args(kind)
        return _object(_decoder(key), _decoder(item), bounds)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum(kind)
    simple = {int: _int, float: _float, str: _text, bool: _bool}.get(kind)
    if simple is None:
        raise TypeError(f"{kind} is not a type of the protocol")
    return functools.partial(simple, bounds)


def _optional(kind: Any, bounds: Bounds) -> Decoder:
    members = [m for m in typing.get_args(kind) if m is not type(None)]
    if len(members) != 1:
        raise TypeError(f"{kind}: the protocol has no unions of several types")
    decode = _decoder(members[0], bounds)
    return lambda value: None if value is None else decode(value)


def _list(decode: Decoder, bounds: Bounds) -> Decoder:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _MismatchError(f"expected a list, found {type(value).__name__}")
        if len(value) > bounds.items:
            raise _MismatchError(f"{len(value)} entries, at most {bounds.items} are accepted")
        items = []
        try:
            for item in value:
                items.append(decode(item))
        except _MismatchError as error:
            error.path.append(f"[{len(items)}]")
            raise
        return tuple(items)

    return read


def _object(key: Decoder, decode: Decoder, bounds: Bounds) -> Decoder:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MismatchError(f"expected an object, found {type(value).__name__}")
        if len(value) > bounds.items and not bounds.clip:
            raise _MismatchError(f"{len(value)} entries, at most {bounds.items} are accepted")
        result: dict[Any, Any] = {}
        for name, item in value.items():
            if len(result) == bounds.items:
                break
            try:
                result[key(name)] = decode(item)
            except _MismatchError as error:
                error.path.append(f".{_shown(name)}")
                raise
        return result

    return read


def _dataclass(kind: Any) -> Decoder:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields: list[tuple[str, str, Decoder, bool, bool]] = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        has_default = not (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        fields.append(
            (field.name, camel(field.name), _decoder(hint), _is_optional(hint), has_default)
        )

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MismatchError(f"expected an object, found {type(value).__name__}")
        arguments: dict[str, Any] = {}
        for name, wire, decode, optional, has_default in fields:
            if wire in value:
                try:
                    arguments[name] = decode(value[wire])
                except _MismatchError as error:
                    error.path.append(f".{wire}")
                    raise
            elif optional:
                arguments[name] = None  # to_json leaves out fields that are None
            elif not has_default:
                raise _MismatchError(f"field {wire} is missing")
        return kind(**arguments)

    return read


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType) and type(None) in typing.get_args(
        kind
    )


def _enum(kind: type[StrEnum]) -> Decoder:
    known = {str(member): member for member in kind}

    def read(value: Any) -> Any:
        found = known.get(value) if isinstance(value, str) else None
        if found is None:
            text = ", ".join(sorted(known))
            raise _MismatchError(f"{_shown(value)} is not one of {text}")
        return found

    return read


def _int(bounds: Bounds, value: Any) -> int:
    if type(value) is not int:
        raise _MismatchError(f"expected int, found {type(value).__name__}")
    if not bounds.low <= value <= bounds.high:
        # The text does not show the value, which may have thousands of digits.
        raise _MismatchError(f"the number is not within {bounds.low}..{bounds.high}")
    return value


def _float(bounds: Bounds, value: Any) -> float:
    if type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise _MismatchError("the number is too large for a float") from None
    if type(value) is not float:
        raise _MismatchError(f"expected float, found {type(value).__name__}")
    if bounds.any_float:
        return value
    if not math.isfinite(value) or not bounds.low <= value <= bounds.high:
        raise _MismatchError(f"{value} is not a number within {bounds.low}..{bounds.high}")
    return value


def _text(bounds: Bounds, value: Any) -> str:
    if not isinstance(value, str):
        raise _MismatchError(f"expected str, found {type(value).__name__}")
    if bounds.clip:
        text = value[: bounds.characters]
        return text if text.isascii() else text.encode(errors="replace").decode()
    if len(value) > bounds.characters:
        raise _MismatchError(f"{len(value)} characters, at most {bounds.characters} are accepted")
    if not value.isascii() and not _is_unicode(value):
        raise _MismatchError("the text has a surrogate without its pair")
    if bounds.pattern is not None and bounds.pattern.fullmatch(value) is None:
        raise _MismatchError(f"{_shown(value)} does not match {bounds.pattern.pattern}")
    return value


def _bool(bounds: Bounds, value: Any) -> bool:
    if type(value) is not bool:
        raise _MismatchError(f"expected bool, found {type(value).__name__}")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """Return a short, printable form of an untrusted value for an error text."""
    text = value[:80] if isinstance(value, str) else type(value).__name__
    return ascii(text)
