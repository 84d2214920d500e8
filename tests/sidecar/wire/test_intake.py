"""Each request on the pod's socket gets a reply, whatever error occurs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS

from holdfast_core import logs
from holdfast_core.errors import NotFoundError, UnavailableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import JobUid, Rank, RestartRound, ShardRef, Step, TierName, Worker
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    Progress,
    Refusal,
    Refused,
    Restore,
    ShardFile,
)
from holdfast_core.messages.socket_frames import (
    Frame,
    parse_body,
    read_frame,
    receive_frame,
    send_frame,
    write_frame,
)
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.wire.intake import Attached, Intake, LocalConnection, LocalConnections

JOB = JobUid("job-1")
FILE = ShardFile(
    "shards/x",
    ShardRef(JOB, Step(1), RestartRound(1), Rank(0), digest_of(b"")),
    TierName.NODE,
    is_attached=True,
)
STATE = RoundState(Worker(0), 1, RestartRound(1), "gpt-0-r0")


class Failing:
    """A LocalHandler whose requests end as the test sets."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def state(self) -> RoundState:
        return STATE

    def hello(self, connection: LocalConnection) -> HelloReply:
        return HelloReply(STATE.round)

    def gone(self, connection: LocalConnection) -> None:
        return

    async def request(self, connection: LocalConnection, message: object) -> object:
        raise self._error

    def notify(self, connection: LocalConnection, message: object) -> None:
        raise AssertionError(message)


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Return a short path: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "s"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotFoundError("no such shard"), (Refusal.NOT_FOUND, "no such shard")),
        (UnavailableError("the disk is slow"), (Refusal.BUSY, "the disk is slow")),
        (OSError("no room"), (Refusal.BUSY, "no room")),
        (KeyError(7), (Refusal.BUSY, "KeyError(7)")),
        (IndexError(), (Refusal.BUSY, "IndexError()")),
    ],
)
def test_a_request_that_fails_is_answered(
    socket_path: Path, error: Exception, expected: tuple[Refusal, str]
) -> None:
    async def scenario() -> Frame | None:
        intake = Intake(socket_path, JOB, Failing(error), LocalConnections())
        await intake.start()
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        try:
            hello = Hello(PROTOCOL_VERSION, JOB, rank=Rank(0))
            writer.write(write_frame(hello, 1))
            await read_frame(reader)
            writer.write(write_frame(Restore(RestartRound(1), Rank(0)), 2))
            async with asyncio.timeout(HANG_SECONDS):
                return await read_frame(reader)
        finally:
            writer.close()
            await intake.close()

    reply = asyncio.run(scenario())
    assert isinstance(reply.message, Refused)
    assert reply.id == 2
    assert (reply.message.code, reply.message.message) == expected


class Opening(Failing):
    """A LocalHandler that answers each request with an open file."""

    def __init__(self, path: Path) -> None:
        super().__init__(UnavailableError("unused"))
        self._path = path

    async def request(self, connection: LocalConnection, message: object) -> object:
        return Attached(FILE, os.open(self._path, os.O_RDONLY))


def test_a_reply_carries_an_open_file_and_the_sidecar_closes_its_own(
    socket_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "shard").write_bytes(b"payload")

    def client() -> tuple[Frame | None, list[bytes]]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(HANG_SECONDS)
            sock.connect(str(socket_path))
            send_frame(sock, Hello(PROTOCOL_VERSION, JOB, rank=Rank(0)), 1)
            receive_frame(sock)
            send_frame(sock, Restore(RestartRound(1), Rank(0)), 2)
            first, files, _, _ = socket.recv_fds(sock, 4, 4)
            body = sock.recv(int.from_bytes(first))
        contents = [os.pread(fd, 100, 0) for fd in files]
        for fd in files:
            os.close(fd)
        return parse_body(body), contents

    async def scenario() -> tuple[Frame | None, list[bytes]]:
        intake = Intake(socket_path, JOB, Opening(tmp_path / "shard"), LocalConnections())
        await intake.start()
        try:
            return await asyncio.to_thread(client)
        finally:
            await intake.close()

    frame, contents = asyncio.run(scenario())
    assert frame == Frame(2, FILE)
    assert contents == [b"payload"]
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert str(tmp_path / "shard") not in opened


class Listening(Failing):
    """A LocalHandler that records what ranks push."""

    def __init__(self) -> None:
        super().__init__(UnavailableError("no request is expected"))
        self.received: list[object] = []

    def notify(self, connection: LocalConnection, message: object) -> None:
        self.received.append(message)


@pytest.mark.fault("The launcher's last state overtakes a rank's last Progress")
def test_the_end_of_the_ranks_comes_after_all_that_they_sent(socket_path: Path) -> None:
    """The launcher reports that the ranks have returned on a connection of its own, which may be faster."""

    async def scenario() -> list[object]:
        handler, connections = Listening(), LocalConnections()
        intake = Intake(socket_path, JOB, handler, connections)
        await intake.start()
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        writer.write(write_frame(Hello(PROTOCOL_VERSION, JOB, rank=Rank(0)), 1))
        await read_frame(reader)
        ended = asyncio.create_task(connections.ranks_ended(HANG_SECONDS))
        await asyncio.sleep(0)
        assert not ended.done()
        writer.write(write_frame(Progress(RestartRound(1), Rank(0), Step(7)), 0))
        writer.close()
        assert await ended
        received = list(handler.received)
        await intake.close()
        return received

    assert asyncio.run(scenario()) == [Progress(RestartRound(1), Rank(0), Step(7))]


@pytest.mark.fault("A forked child holds its rank's connection open at the end")
def test_a_connection_that_outlives_its_rank_does_not_hold_up_the_end(socket_path: Path) -> None:
    """A data loader's worker inherits the socket of the rank that forked it."""

    async def scenario() -> bool:
        connections = LocalConnections()
        intake = Intake(socket_path, JOB, Listening(), connections)
        await intake.start()
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        writer.write(write_frame(Hello(PROTOCOL_VERSION, JOB, rank=Rank(0)), 1))
        await read_frame(reader)
        ended = await connections.ranks_ended(0.05)
        writer.close()
        await intake.close()
        return ended

    assert asyncio.run(scenario()) is False


def test_a_request_that_fails_at_any_rate_fills_no_log(
    socket_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer may repeat a request as fast as it is answered."""

    async def scenario() -> None:
        intake = Intake(socket_path, JOB, Failing(KeyError(7)), LocalConnections())
        await intake.start()
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        try:
            writer.write(write_frame(Hello(PROTOCOL_VERSION, JOB, rank=Rank(0)), 1))
            await read_frame(reader)
            for number in range(2, 1000):
                writer.write(write_frame(Restore(RestartRound(1), Rank(0)), number))
                await read_frame(reader)
        finally:
            writer.close()
            await intake.close()

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure("INFO", ManualClock(), own_warnings=20)
        asyncio.run(scenario())
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    log = capsys.readouterr().err
    failures = [line for line in log.splitlines() if "Restore failed" in line]
    assert sum("exception" in line for line in failures) == 1
    assert len(log) < 20_000
