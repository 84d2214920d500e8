"""Frames on the pod's Unix socket: u32 big-endian length, then JSON {type, id, body} of at most 1 MiB.

asyncio code reads and builds frames with `read_frame` and `write_frame`. Threads that wait for one frame use
`receive_frame` and `send_frame`, and a thread that also waits for others uses `take_frames`.

A request has id > 0 and gets one reply with the same id. A push has id 0 and gets none. A frame of an unknown
type comes from a newer sender: a push is skipped, and a request is returned with its RawFrame as message, so
that the caller can refuse it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.ids import Natural
from holdfast_core.messages import schema
from holdfast_core.messages.codec import MAX_MESSAGE_BYTES, Text, dumps, loads

_LENGTH = struct.Struct("!I")

MESSAGES: Mapping[str, type[Any]] = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            schema.Refused,
            schema.Ok,
            schema.Hello,
            schema.HelloReply,
            schema.Restore,
            schema.RestoreReply,
            schema.Fill,
            schema.Filled,
            schema.ShardFile,
            schema.TakeStore,
            schema.Stage,
            schema.Progress,
            schema.StepOutcome,
            schema.Plan,
            schema.LauncherPlan,
            schema.LauncherState,
        )
    }
)
"""Every message type that the socket carries, by its name on the wire."""


class RawFrame(msgspec.Struct):
    """A frame as it is sent. It is the message of a Frame whose type this release does not support."""

    type: Text
    id: Natural = 0
    body: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame."""

    id: int
    """0 for a push. A reply has the id of its request."""
    message: Any


def write_frame(message: Any, id: int = 0) -> bytes:
    """Return the bytes of one frame.

    Args:
        id: 0 for a push, otherwise the id of the request.

    Raises:
        FormatError: The socket does not carry this message type, or the body is larger than 1 MiB.
    """
    name = type(message).__name__
    if MESSAGES.get(name) is not type(message):
        raise FormatError(f"{name} is not a message of the socket")
    body = dumps(RawFrame(name, id, msgspec.Raw(dumps(message))))
    if len(body) > MAX_MESSAGE_BYTES:
        raise FormatError(f"{name}: frame of {len(body)} bytes, at most {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def parse_body(body: bytes) -> Frame:
    """Parse the body of a frame, which follows its length. Raises FormatError."""
    frame = loads(RawFrame, body, limit_bytes=MAX_MESSAGE_BYTES)
    cls = MESSAGES.get(frame.type)
    if cls is None:
        return Frame(frame.id, frame)
    return Frame(frame.id, loads(cls, bytes(frame.body), limit_bytes=MAX_MESSAGE_BYTES))


Room = Callable[[int], AbstractAsyncContextManager[None]]
"""Reserves that many bytes of memory for the body of a frame until its context ends."""


async def read_frame(
    reader: asyncio.StreamReader,
    *,
    limit_bytes: int = MAX_MESSAGE_BYTES,
    room: Room = lambda length: nullcontext(),
    body_seconds: float | None = None,
) -> Frame | None:
    """Read the next frame. Return None if the peer closed the connection between two frames.

    Args:
        limit_bytes: Largest body.
        room: Reserves memory for the body. It is entered before the body is read and left when the
            frame is parsed.
        body_seconds: Time-out for reserving memory and reading the body. None means no time-out.

    Raises:
        FormatError: The frame is not valid.
        UnavailableError: The connection broke, or the body took too long.
    """
    while True:
        try:
            length = _checked_length(await reader.readexactly(_LENGTH.size), limit_bytes)
            async with asyncio.timeout(body_seconds), room(length):
                frame = parse_body(await reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            if not error.partial and error.expected == _LENGTH.size:
                return None
            raise UnavailableError(
                "socket: the peer closed the connection within a frame"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"socket: reading a frame: {error or type(error).__name__}"
            ) from error
        if not _is_unknown_push(frame):
            return frame


def receive_frame(sock: socket.socket) -> Frame | None:
    """Read the next frame in a thread, like `read_frame`.

    A time-out of the socket raises UnavailableError. It may leave a part of a frame unread, so the
    caller must close the connection.
    """
    while True:
        head = _receive(sock, _LENGTH.size)
        if head is None:
            return None
        body = _receive(sock, _checked_length(head))
        if body is None:
            raise UnavailableError("socket: the peer closed the connection within a frame")
        frame = parse_body(body)
        if not _is_unknown_push(frame):
            return frame


def take_frames(received: bytearray) -> list[Frame]:
    """Remove the frames that are complete from received bytes and return them.

    Raises FormatError for an invalid frame. The stream cannot be decoded any further then, and the
    connection must be closed.
    """
    frames: list[Frame] = []
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _checked_length(received[: _LENGTH.size])
        if len(received) < end:
            break
        frame = parse_body(bytes(received[_LENGTH.size : end]))
        del received[:end]
        if not _is_unknown_push(frame):
            frames.append(frame)
    return frames


def send_frame(sock: socket.socket, message: Any, id: int = 0) -> None:
    """Send one whole frame. Raises FormatError, UnavailableError.

    Threads that share a socket must hold a lock around the call.
    """
    data = write_frame(message, id)
    try:
        sock.sendall(data)
    except OSError as error:
        raise UnavailableError(f"socket: sending {type(message).__name__}: {error}") from error


def _checked_length(head: bytes | bytearray, limit_bytes: int = MAX_MESSAGE_BYTES) -> int:
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= limit_bytes:
        raise FormatError(f"frame: {length} bytes, expected 1..{limit_bytes}")
    return int(length)


def _receive(sock: socket.socket, length: int) -> bytes | None:
    data = bytearray(length)
    view = memoryview(data)
    filled = 0
    while filled < length:
        try:
            count = sock.recv_into(view[filled:])
        except OSError as error:
            raise UnavailableError(f"socket: reading a frame: {error}") from error
        if count == 0:
            if filled == 0:
                return None
            raise UnavailableError("socket: the peer closed the connection within a frame")
        filled += count
    return bytes(data)


def _is_unknown_push(frame: Frame) -> bool:
    return frame.id == 0 and isinstance(frame.message, RawFrame)
