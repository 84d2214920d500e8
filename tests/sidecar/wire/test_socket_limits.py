"""The pod's socket under attack: connections that have not identified themselves occupy little memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast_core.ids import JobUid, Rank, RestartRound, Worker
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    Hello,
    Ok,
    Restore,
)
from holdfast_core.messages.socket_frames import read_frame, write_frame
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.wire.intake import Intake, IntakeLimits, LocalConnection, LocalConnections

JOB = JobUid("job-1")
NOW = RestartRound(5)
HOUR = 3600.0


class Local:
    """A LocalHandler that answers nothing."""

    state = RoundState(Worker(0), 2, NOW, "gpt-0-r0")

    def hello(self, connection: LocalConnection) -> Ok:
        return Ok(RestartRound(0))

    def gone(self, connection: LocalConnection) -> None:
        return

    async def request(self, connection: LocalConnection, message: object) -> object:
        return Ok(RestartRound(0))

    def notify(self, connection: LocalConnection, message: object) -> None:
        return


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a short path: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "s"


@asynccontextmanager
async def intake(path: Path, limits: IntakeLimits | None = None) -> AsyncIterator[Intake]:
    server = Intake(path, JOB, Local(), LocalConnections(), limits=limits)  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def local(stack: ExitStack, path: Path, text: bytes) -> socket.socket:
    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    sock.settimeout(HANG_SECONDS)
    sock.connect(str(path))
    with contextlib.suppress(OSError):
        sock.sendall(text)
    sock.setblocking(False)
    return sock


HELLO = write_frame(Hello(PROTOCOL_VERSION, JOB, rank=Rank(0)), 1)


async def is_served(path: Path) -> bool:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(HELLO)
    await read_frame(reader)
    writer.write(write_frame(Restore(NOW, Rank(0)), 2))
    frame = await read_frame(reader)
    writer.close()
    return frame is not None and isinstance(frame.message, Ok)


@pytest.mark.fault("A process sends unfinished frames to the pod's socket before Hello")
async def test_unfinished_frames_before_hello_hold_few_bytes(path: Path) -> None:
    """Before Hello, a frame of a megabyte is refused by its length alone."""
    async with intake(path, IntakeLimits(hello_seconds=HOUR)) as server:
        with ExitStack() as stack:
            unfinished = (4000).to_bytes(4, "big") + b"{"
            for _ in range(1024):
                local(stack, path, unfinished)
                await asyncio.sleep(0)
            assert await is_served(path)
            assert server.connections <= 65
            loop = asyncio.get_running_loop()
            large = local(stack, path, (1 << 20).to_bytes(4, "big") + b"{")
            assert await loop.sock_recv(large, 1) == b""


@pytest.mark.fault("A process sends unfinished frames to the pod's socket after Hello")
async def test_large_unfinished_frames_share_a_few_mebibytes(path: Path) -> None:
    async with intake(path, IntakeLimits(frame_seconds=HOUR)) as server:
        with ExitStack() as stack:
            for rank in (0, 1):
                hello = Hello(PROTOCOL_VERSION, JOB, rank=Rank(rank))
                for _ in range(8):
                    local(stack, path, write_frame(hello, 1) + (1 << 20).to_bytes(4, "big"))
                    await asyncio.sleep(0)
            assert await is_served(path), "small frames need no share"
            assert server.large_bytes == 8 << 20


@pytest.mark.fault("A frame on the pod's socket is never finished")
async def test_an_unfinished_frame_ends_its_connection(path: Path) -> None:
    limits = IntakeLimits(hello_seconds=HOUR, frame_seconds=0.2)
    async with intake(path, limits) as server:
        with ExitStack() as stack:
            loop = asyncio.get_running_loop()
            sock = local(stack, path, HELLO + (1 << 20).to_bytes(4, "big"))
            while await loop.sock_recv(sock, 4096):
                continue  # the reply to Hello
            assert server.large_bytes == 0


async def test_a_connection_without_hello_ends(path: Path) -> None:
    async with intake(path, IntakeLimits(hello_seconds=0.2)):
        with ExitStack() as stack:
            sock = local(stack, path, b"\0")
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""


async def test_nothing_is_served_before_hello(path: Path) -> None:
    async with intake(path):
        with ExitStack() as stack:
            sock = local(stack, path, write_frame(Restore(NOW, Rank(0)), 2))
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
