"""The link's thread continues, whatever its callbacks and its connections raise."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until

from holdfast.connection.link import PERSISTER_PAUSE_SECONDS, Link, OpenedFile, pauses
from holdfast_core.errors import HoldfastError, RefusedError, UnavailableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import JobUid, Rank, RestartRound, ShardRef, Step, TierName
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    Fill,
    Hello,
    HelloReply,
    LauncherPlan,
    Plan,
    Restore,
    RestorePoint,
    RestoreReply,
    ShardFile,
)
from holdfast_core.messages.socket_frames import receive_frame, send_frame, write_frame

ROUND = RestartRound(3)


class Other:
    """The peer of the link: one connection for each `connect`, answered by the test."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self.failures: list[BaseException] = []

    def connect(self) -> socket.socket:
        if self.failures:
            raise self.failures.pop(0)
        ours, theirs = socket.socketpair()
        theirs.settimeout(HANG_SECONDS)
        self.connections.append(theirs)
        return ours

    def greet(self, number: int = 0) -> socket.socket:
        until(lambda: len(self.connections) > number, "a connection")
        connection = self.connections[number]
        frame = receive_frame(connection)
        assert frame is not None and isinstance(frame.message, Hello)
        send_frame(connection, HelloReply(ROUND), frame.id)
        return connection


class Events:
    """Callbacks that raise the errors that the test sets, once for each callback that is named."""

    def __init__(self) -> None:
        self.failures: dict[str, BaseException] = {}
        self.pushed: list[Any] = []
        self.calls: list[str] = []
        self.link: Link | None = None
        self.was_ready: list[bool] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        error = self.failures.pop(name, None)
        if error is not None:
            raise error

    def hello(self) -> Hello:
        self._called("hello")
        return Hello(PROTOCOL_VERSION, JobUid("job"), Rank(0), None)

    def hello_accepted(self, reply: HelloReply) -> None:
        self.was_ready.append(self.link.is_connected)
        self._called("hello_accepted")

    def connected(self) -> None:
        self._called("connected")

    def disconnected(self, reason: str) -> None:
        self._called("disconnected")

    def refused(self, error: HoldfastError) -> None:
        self._called("refused")

    def push(self, message: Any) -> None:
        self._called("push")
        self.pushed.append(message)


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def link(other: Other, events: Events) -> Iterator[Link]:
    link = Link(other.connect, events, hello_seconds=HANG_SECONDS, peer="the other side")
    events.link = link
    yield link
    link.close()
    for connection in other.connections:
        connection.close()


KINDS = [ValueError("x"), MemoryError(), OSError(5, "x"), SystemExit(1), KeyboardInterrupt()]


@pytest.mark.fault("The SDK's link thread or a callback of it raises an exception of any kind")
@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "where", ["push", "disconnected", "connected", "hello_accepted", "hello", "reply"]
)
def test_an_exception_does_not_end_the_thread(
    other: Other, events: Events, link: Link, where: str, error: BaseException
) -> None:
    def raise_it(future: object) -> None:
        raise error

    if where != "reply":
        events.failures[where] = error
    link.start()
    begins_again = where in ("connected", "hello_accepted", "hello", "disconnected")
    if where != "hello":
        connection = other.greet()
    if where == "disconnected":
        until(lambda: "connected" in events.calls, "the first connection")
        connection.close()
    if begins_again:
        connection = other.greet(1)
    assert link.wait_connected(HANG_SECONDS)
    if where == "reply":
        first = link.submit(Restore(ROUND, Rank(0)))
        first.add_done_callback(raise_it)
        answer(connection)
        first.result(HANG_SECONDS)
    if where == "push":
        send_frame(connection, Plan(ROUND, save_from=Step(1)), 0)
    send_frame(connection, Plan(ROUND, save_from=Step(2)), 0)
    until(lambda: [m.save_from for m in events.pushed] == [2], "the next push")
    last = link.submit(Restore(ROUND, Rank(0)))
    answer(connection)
    assert last.result(HANG_SECONDS) == RestoreReply(RestorePoint(Step(7), ROUND))


@pytest.mark.fault("The opening of the connection raises what no code expects")
@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_a_link_retries_a_connection_that_cannot_be_opened(
    other: Other, events: Events, link: Link, error: BaseException
) -> None:
    other.failures.append(error)
    link.start()
    other.greet()
    assert link.wait_connected(HANG_SECONDS)
    assert events.calls.count("disconnected") == 1


@pytest.mark.fault("A folder is unmounted for hours while ranks train")
def test_persisters_of_a_folder_that_is_away_start_more_and_more_rarely() -> None:
    """Each start takes a second of a processor on each rank."""
    waits = list(islice(pauses(PERSISTER_PAUSE_SECONDS), 14))
    assert waits[:4] == [0.02, 0.04, 0.08, 0.16]
    assert waits[-3:] == [30.0, 30.0, 30.0]


@pytest.mark.fault("A stop is requested in round 0")
def test_the_round_is_known_before_the_connection_is_announced(
    other: Other, events: Events, link: Link
) -> None:
    """Otherwise a caller that waited for the connection would send its request in round 0."""
    link.start()
    other.greet()
    assert link.wait_connected(HANG_SECONDS)
    assert events.was_ready == [False]


@pytest.mark.fault("A message does not fit into the send queue of a stopped peer")
def test_a_message_that_cannot_be_queued_fails_at_once(other: Other, link: Link) -> None:
    """Such a message is not lost with a connection, so it would never be sent again."""
    link.start()
    other.greet()
    assert link.wait_connected(HANG_SECONDS)
    futures = []
    while not (futures and futures[-1].done()):  # the peer reads nothing
        futures.append(link.submit(LauncherPlan(ROUND, stacks_token="x" * 500_000)))
    with pytest.raises(RefusedError, match="wait to be sent to the other side"):
        futures[-1].result()


def answer(connection: socket.socket) -> None:
    frame = receive_frame(connection)
    assert frame is not None and isinstance(frame.message, Restore)
    send_frame(connection, RestoreReply(RestorePoint(Step(7), ROUND)), frame.id)


FILL = Fill(ROUND, Rank(0), (), reads_files=True)
SHARD = ShardRef(JobUid("job"), Step(1), ROUND, Rank(0), digest_of(b""))
ATTACHED = ShardFile("shards/x", SHARD, TierName.NODE, is_attached=True)


def test_a_reply_brings_its_open_file(
    tmp_path: Path, other: Other, events: Events, link: Link
) -> None:
    (tmp_path / "shard").write_bytes(b"payload")
    link.start()
    connection = other.greet()
    until(lambda: link.is_connected, "a connection")
    replies = [link.submit(FILL) for _ in range(2)]
    for _ in replies:
        frame = receive_frame(connection)
        data = write_frame(ATTACHED, frame.id)
        with open(tmp_path / "shard", "rb") as file:  # the first byte brings the file
            socket.send_fds(connection, [data[:1]], [file.fileno()])
        connection.sendall(data[1:])
    for reply in replies:
        opened = reply.result(HANG_SECONDS)
        assert isinstance(opened, OpenedFile)
        assert opened.file == ATTACHED
        assert os.pread(opened.fd, 100, 0) == b"payload"
        os.close(opened.fd)


def test_a_reply_without_its_open_file_ends_the_connection(
    other: Other, events: Events, link: Link
) -> None:
    link.start()
    connection = other.greet()
    until(lambda: link.is_connected, "a connection")
    reply = link.submit(FILL)
    frame = receive_frame(connection)
    send_frame(connection, ATTACHED, frame.id)
    with pytest.raises(UnavailableError, match="carries no open file"):
        reply.result(HANG_SECONDS)


@pytest.mark.fault("A connection ends between an open file and its frame")
def test_no_file_stays_open_when_a_connection_ends_within_a_frame(
    tmp_path: Path, other: Other, events: Events, link: Link
) -> None:
    (tmp_path / "shard").write_bytes(b"payload")
    link.start()
    connection = other.greet()
    until(lambda: link.is_connected, "a connection")
    link.submit(FILL)
    with open(tmp_path / "shard", "rb") as file:
        socket.send_fds(connection, [b"\0"], [file.fileno()])
    connection.close()
    until(lambda: "disconnected" in events.calls, "the end of the connection")
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert str(tmp_path / "shard") not in opened
