"""JSON of messages. Data from a peer is untrusted until it is decoded here.

msgspec encodes and decodes a message by the types of its fields, as it does layouts and manifests
(format.canonical). The names on the wire are those in Python. Unknown fields are skipped, because a newer
sender may send them. Wrong types, missing fields without a default, and values out of their bounds
(messages.bounds) are refused, and the error names the path of the field. A message that is `Sparse` leaves
out the fields that have their defaults.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import msgspec

from holdfast_core.format.canonical import decode_typed, encode_typed, expect_length
from holdfast_core.messages.bounds import Sparse, body_limit_bytes

T = TypeVar("T")

MAX_MESSAGE_BYTES = 1 << 20
"""Largest body of a frame on the pod's Unix socket."""
MAX_CONTROL_BYTES = 64 << 20
"""Largest body of any message over HTTPS."""

_ENCODER = msgspec.json.Encoder()
_decoder = functools.cache(msgspec.json.Decoder)


def dumps(message: Any) -> bytes:
    """Return a message as JSON. Raises FormatError if a text is not valid Unicode."""
    return encode_typed(_ENCODER, _sent(message), type(message).__name__)


def loads(cls: type[T], data: bytes, *, limit_bytes: int | None = None) -> T:
    """Parse bytes into a message.

    Args:
        limit_bytes: Largest body. None means the limit of this message in messages.bounds.

    Raises:
        FormatError: The bytes are not a valid message. The text names the message, the path of the
            field and the reason.
    """
    expect_length(data, cls.__name__, limit_bytes or body_limit_bytes(cls))
    kind: Any = cls
    message: T = decode_typed(_decoder(kind), data, cls.__name__)
    return message


def _sent(value: Any) -> Any:
    """Return what is encoded of a value: of a sparse message the fields that differ from their defaults.

    msgspec leaves out defaults only of its own structs, not of dataclasses.
    """
    if isinstance(value, Sparse):
        kind: Any = type(value)
        found = ((name, getattr(value, name), default) for name, default in _defaults(kind))
        return {name: _sent(x) for name, x, default in found if x is not default and x != default}
    if isinstance(value, tuple):
        return [_sent(one) for one in value]
    return value


@functools.cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the name and the default of each field. The default of a required field equals no value."""
    return tuple((field.name, field.default) for field in dataclasses.fields(kind))
