"""JSON of messages. Data from a peer is untrusted until it is decoded here.

msgspec encodes and decodes a message by the types of its fields, as it does layouts and manifests
(format.canonical). The names on the wire are those in Python. Unknown fields are skipped, because a newer
sender may send them. Wrong types, missing fields without a default, and values out of their bounds
(messages.bounds) are refused, and the error names the path of the field.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import msgspec

from holdfast_core.format.canonical import decode_typed, encode_typed, expect_length
from holdfast_core.messages.bounds import body_limit_bytes

T = TypeVar("T")

MAX_MESSAGE_BYTES = 1 << 20
"""Largest body of a frame on the pod's Unix socket."""
MAX_CONTROL_BYTES = 64 << 20
"""Largest body of any message over HTTPS."""

_ENCODER = msgspec.json.Encoder()
_decoder = functools.cache(msgspec.json.Decoder)


def dumps(message: Any) -> bytes:
    """Return a message as JSON. Raises FormatError if a text is not valid Unicode."""
    return encode_typed(_ENCODER, message, type(message).__name__)


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
