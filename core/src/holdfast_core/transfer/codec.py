"""Strict JSON codec for frozen dataclasses: what a peer sends is hostile until it has passed here.

Field names are snake_case in Python and camelCase on the wire. Unknown fields are ignored (a newer
sender), missing fields without a default and wrong types are refused, with the path in the message.
Integers are bounded to 2^63. Nothing here knows a particular message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from enum import StrEnum
from typing import Any, TypeVar, Union

from holdfast_core.errors import FormatError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 1 << 20
MAX_CONTROL_BYTES = 64 << 20
_MAX_INT = (1 << 63) - 1


@functools.lru_cache(maxsize=4096)
def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def to_json(message: Any) -> Any:
    """The JSON value of a message; None-valued optional fields are left out."""
    if dataclasses.is_dataclass(message) and not isinstance(message, type):
        values: dict[str, Any] = {}
        for field in dataclasses.fields(message):
            value = getattr(message, field.name)
            if value is not None:
                values[camel(field.name)] = to_json(value)
        return values
    if isinstance(message, dict):
        return {str(k): to_json(v) for k, v in message.items()}
    if isinstance(message, list | tuple):
        return [to_json(v) for v in message]
    return message


def dumps(message: Any) -> bytes:
    return json.dumps(to_json(message), separators=(",", ":"), allow_nan=True).encode()


def loads(cls: type[T], data: bytes, *, limit_bytes: int = MAX_CONTROL_BYTES) -> T:
    """Parse bytes into a message. Raises FormatError naming the message, the path and what is wrong."""
    if len(data) > limit_bytes:
        raise FormatError(f"{cls.__name__}: {len(data)} bytes, at most {limit_bytes} are accepted")
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{cls.__name__}: not valid JSON: {error}") from error
    return from_json(cls, value)


def from_json(cls: type[T], value: Any) -> T:
    return typing.cast(T, _decode(cls, value, cls.__name__))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


@functools.lru_cache(maxsize=512)
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, value: Any, path: str) -> Any:
    while hasattr(kind, "__supertype__"):  # NewType
        kind = kind.__supertype__
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        members = [m for m in typing.get_args(kind) if m is not type(None)]
        if value is None and len(members) < len(typing.get_args(kind)):
            return None
        if len(members) != 1:
            raise FormatError(f"{path}: unions of several types are not part of the protocol")
        return _decode(members[0], value, path)
    if origin is tuple:
        (item, *_) = typing.get_args(kind)
        if not isinstance(value, list):
            raise FormatError(f"{path}: expected a list, found {type(value).__name__}")
        return tuple(_decode(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        key_kind, item = typing.get_args(kind)
        if not isinstance(value, dict):
            raise FormatError(f"{path}: expected an object, found {type(value).__name__}")
        return {_key(key_kind, k, path): _decode(item, v, f"{path}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, path)
    return _scalar(kind, value, path)


def _decode_dataclass(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected an object, found {type(value).__name__}")
    hints = _hints(kind)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = camel(field.name)
        if name in value:
            arguments[field.name] = _decode(hints[field.name], value[name], f"{path}.{name}")
        elif _is_optional(hints[field.name]):
            arguments[field.name] = None  # to_json leaves out what is None
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise FormatError(f"{path}: field {name} is missing")
    return kind(**arguments)


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType) and type(None) in typing.get_args(
        kind
    )


def _key(kind: Any, text: str, path: str) -> Any:
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    if kind is int:
        try:
            return int(text)
        except ValueError as error:
            raise FormatError(f"{path}: key {text!r} is not a whole number") from error
    return text


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError as error:
            known = ", ".join(sorted(kind))
            raise FormatError(f"{path}: {value!r} is not one of {known}") from error
    if type(value) is not kind:
        raise FormatError(
            f"{path}: expected {getattr(kind, '__name__', kind)}, found {type(value).__name__}"
        )
    if kind is int and abs(value) > _MAX_INT:
        raise FormatError(f"{path}: {value} does not fit 64 bits")
    return value
