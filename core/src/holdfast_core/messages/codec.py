"""JSON of messages, and the bounds of their fields. Data from a peer is untrusted until it is decoded here.

msgspec enforces the bounds before any other code uses a value. They are far above what an honest sender
needs. They keep a hostile sender from using much memory and time, and from causing a status that the
API server refuses. Identities have their bounds in `ids`.

msgspec encodes and decodes a message by the types of its fields, as it does layouts and manifests
(format.canonical). The names on the wire are those in Python. Unknown fields are skipped, because a newer
sender may send them. Wrong types, missing fields without a default, and values out of their bounds are
refused, and the error names the path of the field.
"""

from __future__ import annotations

import functools
import typing
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from holdfast_core.format.canonical import decode_typed, encode_typed, expect_length
from holdfast_core.ids import MAX_INT, MAX_WORKERS

T = TypeVar("T")

MAX_RANKS = 4096 * 64
"""The largest spec.workers times the largest spec.procsPerWorker (core/api)."""
MAX_LISTED = 1024
"""Largest number of manifests that an inventory or a report lists."""
MAX_STRAGGLERS = 16
"""Largest number of stragglers that a coordinator and a job's status name."""
MAX_METRICS = 64
"""Largest number of metrics of one rank."""
MAX_METRIC_NAME = 128
MAX_VALUED_STEPS = 8
"""Largest number of steps of which a report has the metrics. Uploads are at most three steps behind."""

MAX_REPORTED = 2048
"""Largest number of shards that the report of a worker lists. At most a kilobyte each, they fit into it."""

ExitCode = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
Seconds = Annotated[float, Meta(ge=0, le=10**12)]
"""A finite duration in seconds."""
Factor = Annotated[float, Meta(ge=0, le=10**6)]
"""How many times as long as something else takes."""
Text = Annotated[str, Meta(max_length=1024)]
Reason = Annotated[str, Meta(pattern=r"\A[A-Za-z][A-Za-z0-9]{0,127}\Z")]
"""The reason of a condition: one CamelCase word of 1 to 128 characters, as the CRD requires."""
Name = Annotated[str, Meta(max_length=253)]
Document = Annotated[str, Meta(max_length=64 << 20)]
"""The text of a manifest. The parser of the format checks its contents."""
ClippedText = Annotated[str, Meta(max_length=4096, extra={"clip": True})]
"""Text for people, in a message that is `Clipped`."""
ShortText = Annotated[str, Meta(max_length=512, extra={"clip": True})]
"""Text for people of which a message has one for each rank, in a message that is `Clipped`."""
Reported = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_METRIC_NAME)], float], Meta(max_length=MAX_METRICS)
]
"""Metrics that a training script reports."""
MAX_MANY = 4096
Many = Annotated[tuple[T, ...], Meta(max_length=MAX_MANY)]

PerRank = Meta(max_length=MAX_RANKS)
PerWorker = Meta(max_length=MAX_WORKERS)
ManyShards = Meta(max_length=4 * MAX_RANKS)

KIB = 1 << 10
MIB = 1 << 20
_DEFAULT_BYTES = 256 * KIB
_MAX_BYTES = MappingProxyType(
    {
        "Stage": 16 * KIB,
        "Seal": 4 * KIB,
        "GangRequest": 4 * KIB,
        "Refused": 64 * KIB,
        "Ok": 1 * MIB,
        "Round": 4 * MIB,
        "Plan": 1 * MIB,
        "WorkerReports": 64 * MIB,
        "FinishCommit": 64 * MIB,
        "bytes": 64 * MIB,  # a document as it is stored, such as a manifest
        "Inventory": 16 * MIB,
        "CoordinatorState": 16 * MIB,
    }
)


class Clipped:
    """Base of messages with texts for people.

    Whoever makes such a message need not know its bounds: a text that is too long is cut, and one that is
    not valid Unicode, such as a path, is repaired. So no message is lost because of its text.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for field, limit in _clipped_fields(kind):
            text = getattr(self, field)
            if len(text) > limit or not text.isascii():
                object.__setattr__(self, field, clipped(text, limit))


def clipped(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, as valid Unicode."""
    return text[:limit].encode(errors="replace").decode()


@functools.cache
def _clipped_fields(kind: type[Any]) -> tuple[tuple[str, int], ...]:
    """Return the fields of a message with a text for people, and the bounds of these texts."""
    return tuple(
        (field, note.max_length or 0)
        for field, hint in typing.get_type_hints(kind, include_extras=True).items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Meta) and note.extra == {"clip": True}
    )


def body_limit_bytes(kind: type[Any]) -> int:
    """Return the largest JSON body of a message for a job of any size."""
    return _MAX_BYTES.get(kind.__name__, _DEFAULT_BYTES)


def reply_limit_bytes(kind: type[Any], ranks: int) -> int:
    """Return the largest body that a sidecar of a job with `ranks` ranks may send.

    Inventory and CoordinatorState have entries for each rank, so a small job needs only small bodies.
    """
    largest = body_limit_bytes(kind)
    if largest <= _DEFAULT_BYTES:
        return largest
    return min(largest, _DEFAULT_BYTES + 16 * KIB * ranks)


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
        limit_bytes: Largest body. None means the limit of this message.

    Raises:
        FormatError: The bytes are not a valid message. The text names the message, the path of the
            field and the reason.
    """
    expect_length(data, cls.__name__, limit_bytes or body_limit_bytes(cls))
    kind: Any = cls
    message: T = decode_typed(_decoder(kind), data, cls.__name__)
    return message
