from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading

import msgspec
import pytest

from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.ids import Digest, Rank, RestartRound, Step
from holdfast_core.messages.schema import (
    LauncherPlan,
    LauncherState,
    Ok,
    Progress,
    Refusal,
    Refused,
    Stage,
    TakeStore,
)
from holdfast_core.messages.socket_frames import (
    MESSAGES,
    Frame,
    RawFrame,
    parse_body,
    read_frame,
    receive_frame,
    send_frame,
    write_frame,
)

STAGE = Stage(
    RestartRound(1), Step(10), Rank(0), "rank000000.0.slot", 100, Digest("b3:" + "0" * 64)
)


def raw(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


async def read_all(data: bytes) -> list[Frame]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    frames = []
    while (frame := await read_frame(reader)) is not None:
        frames.append(frame)
    return frames


def test_the_bytes_of_a_frame() -> None:
    body = b'{"type":"TakeStore","id":7,"body":{"round":2}}'
    assert write_frame(TakeStore(RestartRound(2)), 7) == raw(body)


@pytest.mark.parametrize(
    ("message", "id_"),
    [
        (STAGE, 3),
        (Ok(RestartRound(0)), 3),
        (LauncherState(RestartRound(2), finished=True), 0),
        (Refused(Refusal.STALE_ROUND, "older", RestartRound(4)), 9),
        (Progress(RestartRound(1), Rank(0), Step(5), {"loss": 0.5}), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_both_readers_read_what_is_written(message: object, id_: int) -> None:
    expected = Frame(id_, message)
    assert asyncio.run(read_all(write_frame(message, id_))) == [expected]
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, message, id_)
        assert receive_frame(right) == expected
        left.close()
        assert receive_frame(right) is None


def test_frames_in_pieces() -> None:
    left, right = socket.socketpair()
    data = write_frame(STAGE, 1) + write_frame(STAGE, 2)

    def trickle() -> None:
        with left:
            for start in range(0, len(data), 7):
                left.sendall(data[start : start + 7])

    thread = threading.Thread(target=trickle)
    thread.start()
    with right:
        assert [receive_frame(right), receive_frame(right), receive_frame(right)] == [
            Frame(1, STAGE),
            Frame(2, STAGE),
            None,
        ]
    thread.join()


def test_unknown_pushes_are_skipped_and_unknown_requests_handed_on() -> None:
    data = (
        raw(b'{"type":"NewWord","id":0,"body":{}}')
        + raw(b'{"type":"NewWord","id":4,"body":{}}')
        + write_frame(STAGE, 5)
    )
    unknown = RawFrame("NewWord", 4, msgspec.Raw(b"{}"))
    assert asyncio.run(read_all(data)) == [Frame(4, unknown), Frame(5, STAGE)]


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b'{"type":5,"id":1}',
        b'{"type":"Stage","id":-1,"body":{}}',
        b'{"type":"Stage","id":true,"body":{}}',
        b'{"type":"Stage","id":1,"body":{}}',
        b'{"type":"Stage","id":1,"id":2}',
        b'{"type":"Ok","id":1,"body":{"round":"2"}}',
        b"[" * 100_000,
    ],
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        parse_body(body)


@pytest.mark.parametrize("length", [0, (1 << 20) + 1, 0xFFFFFFFF])
def test_lengths_are_bounded(length: int) -> None:
    with pytest.raises(FormatError, match="expected 1"):
        asyncio.run(read_all(struct.pack("!I", length) + b"x"))


def test_a_frame_that_breaks_off() -> None:
    with pytest.raises(UnavailableError):
        asyncio.run(read_all(write_frame(STAGE, 1)[:-1]))
    with pytest.raises(UnavailableError):
        asyncio.run(read_all(b"\0\0"))


def test_only_messages_of_the_socket_are_sent() -> None:
    with pytest.raises(FormatError, match="not a message"):
        write_frame(RawFrame("x"))
    with pytest.raises(FormatError, match="at most"):
        write_frame(LauncherPlan(RestartRound(0), stacks_token="x" * (1 << 20)))
    assert all(name == cls.__name__ for name, cls in MESSAGES.items())
    assert json.loads(write_frame(STAGE, 1)[4:])["type"] == "Stage"
