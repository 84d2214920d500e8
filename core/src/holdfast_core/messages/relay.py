"""Several messages in one request, for workers that the coordinator reaches through a relay (ADR 0016).

The body is one line of JSON, which lists the letters, and then their bytes one after another. A manifest is
therefore not quoted again as a JSON text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from msgspec import Meta

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import expect_length
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.bounds import Natural, PerWorker, Text, body_limit_bytes
from holdfast_core.messages.codec import dumps, loads

T = TypeVar("T")

_MAX_HEAD_BYTES = 4 << 20
_MANY = Meta(max_length=1 << 16)


@dataclass(frozen=True, slots=True)
class Letter:
    """One message that a relay passes on."""

    path: str
    workers: tuple[Worker, ...]
    """To the coordinator: the worker that has sent it. From the coordinator: those that are to receive it."""
    body: bytes
    """The message as JSON. Empty for a GET request."""


@dataclass(frozen=True, slots=True)
class Relay:
    """POST /v1/relay, relay -> coordinator and coordinator -> relay; reply RelayReply."""

    round: RestartRound
    letters: tuple[Letter, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one worker has answered to one letter, as HTTP status and body. 503: it did not answer."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class RelayReply:
    """One answer for each worker of each letter, in their order."""

    round: RestartRound
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    size_bytes: Natural
    path: Text = ""
    workers: Annotated[tuple[Worker, ...], PerWorker] = ()
    status: Natural = 0


@dataclass(frozen=True, slots=True)
class _Head:
    round: RestartRound
    parts: Annotated[tuple[_Part, ...], _MANY]


def encode(message: Any) -> bytes:
    """Return the body of any message over HTTPS."""
    return b"".join(pieces(message))


def pieces(message: Any) -> tuple[bytes, ...]:
    """Return the body of any message over HTTPS, without a copy of the letters or answers in it."""
    match message:
        case Relay():
            parts = tuple(_Part(len(x.body), x.path, x.workers) for x in message.letters)
            bodies = [x.body for x in message.letters]
        case RelayReply():
            parts = tuple(_Part(len(x.body), status=x.status) for x in message.answers)
            bodies = [x.body for x in message.answers]
        case _:
            return (dumps(message),)
    return (dumps(_Head(message.round, parts)), b"\n", *bodies)


def decode(kind: type[T], data: bytes) -> T:
    """Parse the body of any message over HTTPS.

    Raises:
        FormatError: It is not a valid message of this type.
    """
    if kind is not Relay and kind is not RelayReply:
        return loads(kind, data)
    name = kind.__name__
    expect_length(data, name, body_limit_bytes(kind))
    end = data.find(b"\n")
    if end < 0:
        raise FormatError(f"{name}: expected a line of JSON before the messages")
    head = loads(_Head, data[:end], limit_bytes=_MAX_HEAD_BYTES)
    if sum(part.size_bytes for part in head.parts) != len(data) - end - 1:
        raise FormatError(f"{name}: the messages do not have the lengths that the first line names")
    bodies, offset = [], end + 1
    for part in head.parts:
        bodies.append(data[offset : offset + part.size_bytes])
        offset += part.size_bytes
    parts = zip(head.parts, bodies, strict=True)
    if kind is Relay:
        letters = tuple(Letter(p.path, p.workers, body) for p, body in parts)
        return cast(T, Relay(head.round, letters))
    return cast(T, RelayReply(head.round, tuple(Answer(p.status, body) for p, body in parts)))
