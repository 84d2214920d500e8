"""One full and one small example of each message, made from the types of its fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Annotated, Any, Union

from msgspec import Meta

from holdfast_core.ids import ByteRange, Digest

_DIGEST = "b3:" + "5" * 64


def example(kind: Any, *, full: bool) -> Any:
    """Return a valid value of a type of the protocol. `full`: optional fields and lists are filled."""
    if kind is Digest:
        return Digest(_DIGEST)
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *notes = typing.get_args(kind)
        if any(isinstance(n, Meta) and n.pattern is not None for n in notes):
            return "Reason"
        return example(inner, full=full)
    if origin in (Union, types.UnionType):
        (member,) = (m for m in typing.get_args(kind) if m is not type(None))
        return example(member, full=full) if full else None
    if origin is tuple:
        members = typing.get_args(kind)
        if members[-1] is not Ellipsis:
            return tuple(example(member, full=full) for member in members)
        return (example(members[0], full=full),) * 2 if full else ()
    if origin is dict:
        key, item = typing.get_args(kind)
        return {example(key, full=full): example(item, full=full)} if full else {}
    if kind is ByteRange:
        return ByteRange(3, 5)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        wanted = {f.name: example(hints[f.name], full=full) for f in dataclasses.fields(kind)}
        return kind(**wanted)  # type: ignore[operator]  # a dataclass, no instance of one
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return next(iter(kind))
    return {int: 3, float: 0.5, str: "text", bool: True}[kind]
