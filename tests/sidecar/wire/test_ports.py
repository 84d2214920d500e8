"""The sidecar's ports under attack: connections, bytes and lines of log are counted, never seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.servers.pki import Authority
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.clock import ManualClock
from holdfast_core.contract import operator_dns_name, peer_dns_name
from holdfast_core.ids import JobUid, Rank, RestartRound, Worker
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    Hello,
    Inventory,
    LocalRole,
    Ok,
    Restore,
)
from holdfast_core.messages.socket_frames import read_frame, write_frame
from holdfast_core.net.admission import Places
from holdfast_core.net.listener import ListenerLimits
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.rounds import Caller, RoundState
from holdfast_sidecar.wire.intake import Connection, Intake, IntakeLimits, LocalConnections
from holdfast_sidecar.wire.server import ControlServer, PlainServer

JOB = JobUid("job-1")
POD = "gpt-0-r0"
HOUR = 3600.0
NOW = RestartRound(5)
EMPTY = Inventory(Worker(0), POD, NOW, 1)


def held() -> RoundState:
    """Return the state of worker 0 of a gang that worker 1 coordinates."""
    return accepted(round_message(NOW, coordinator=Worker(1)))


class Handler:
    """Handler of both servers: what was dispatched, and whether bodies were parsed."""

    def __init__(self, state: RoundState | None = None) -> None:
        self.state = held() if state is None else state
        self.dispatched: list[object] = []
        self.rendered = 0

    async def dispatch(self, caller: Caller, path: str, message: Any) -> Any:
        self.dispatched.append(message)
        return Ok(NOW)

    async def inventory(self, caller: Caller) -> Inventory:
        return EMPTY

    def metrics(self) -> bytes:
        self.rendered += 1
        return b"holdfast_something 1.0\n"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TlsFiles]:
    root, authority = tmp_path_factory.mktemp("certs"), Authority()

    def files(name: str) -> TlsFiles:
        return TlsFiles.in_directory(authority.write_leaf(root / name, name))

    return files


Files = Callable[[str], TlsFiles]


@asynccontextmanager
async def control(
    files: Files, handler: Handler, limits: ListenerLimits | None = None
) -> AsyncIterator[tuple[ControlServer, int, Counter[str]]]:
    dropped: Counter[str] = Counter()
    server = ControlServer(
        handler,
        JOB,
        server_context(files(peer_dns_name(POD, JOB))),
        limits=limits,
        dropped=lambda port, reason: dropped.update([f"{port} {reason}"]),
    )
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port, dropped
    finally:
        await server.close()


async def ask(
    port: int,
    context: ssl.SSLContext,
    path: str = "/v1/inventory",
    *,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.request(
            "GET" if body is None else "POST",
            f"https://127.0.0.1:{port}{path}",
            data=body,
            headers=headers,
            server_hostname=peer_dns_name(POD, JOB),
            timeout=aiohttp.ClientTimeout(total=120),
        ) as response,
    ):
        return response.status, json.loads(await response.read())


def silent(stack: ExitStack, port: int, count: int, text: bytes = b"") -> list[socket.socket]:
    found = []
    for _ in range(count):
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        if text:
            with contextlib.suppress(OSError):
                sock.sendall(text)
        sock.setblocking(False)
        found.append(sock)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --------------------------------------------------------------------------- control port


@pytest.mark.parametrize("text", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
async def test_unauthenticated_callers_occupy_few_connections_and_block_no_member(
    certificates: Files, text: bytes
) -> None:
    """They are never timed out here, and come from the address of the operator itself."""
    limits = ListenerLimits(handshake_seconds=HOUR)
    async with control(certificates, Handler(), limits) as (server, port, dropped):
        operator = client_context(certificates(operator_dns_name(JOB)))
        before = descriptors()
        with ExitStack() as stack:
            for number in range(1, 11):
                await asyncio.to_thread(silent, stack, port, 40, text)
                assert (await ask(port, operator))[0] == 200
                assert server.connections <= 64 + 128 + 1
                own = descriptors() - before - 40 * number
                assert own <= 64 + 128 + 32, "those that lost their place are closed"
        assert dropped["control room"] >= 400 - 193


async def test_a_handshake_that_does_not_come_ends(certificates: Files) -> None:
    limits = ListenerLimits(handshake_seconds=0.2)
    async with control(certificates, Handler(), limits) as (server, port, dropped):
        loop = asyncio.get_running_loop()
        before = descriptors()
        with ExitStack() as stack:
            sockets = await asyncio.to_thread(silent, stack, port, 8)
            async with asyncio.timeout(45):  # asyncio itself ends a handshake after 60 s
                for sock in sockets:
                    assert await loop.sock_recv(sock, 1) == b""
        assert server.connections == 0
        assert descriptors() == before
        assert dropped["control handshake"] == 8


async def test_connections_of_one_pod_are_bounded(certificates: Files) -> None:
    limits = ListenerLimits(Places(known_per_name=3))
    async with control(certificates, Handler(), limits) as (server, port, _):
        pod = client_context(certificates(peer_dns_name("gpt-1-r0", JOB)))
        writers = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=pod, server_hostname=peer_dns_name(POD, JOB)
            )
            writers.append((reader, writer))
        for reader, _ in writers[:2]:
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
        assert server.connections == 3
        operator = client_context(certificates(operator_dns_name(JOB)))
        assert (await ask(port, operator))[0] == 200
        for _, writer in writers:
            writer.close()


@pytest.mark.parametrize("path", ["/v1/manifest", "/v1/prepared", "/v1/report", "/v1/suspect"])
async def test_a_former_member_is_refused_before_its_body_is_sent(
    certificates: Files, path: str
) -> None:
    """It announces 63 MiB and waits for an answer before it sends any of them."""
    handler = Handler()
    async with control(certificates, handler) as (_, port, _):
        former = client_context(certificates(peer_dns_name("gpt-9-r0", JOB)))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=former, server_hostname=peer_dns_name(POD, JOB)
        )
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {63 << 20}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 409")
        writer.close()
    assert handler.dispatched == []


@pytest.mark.parametrize(
    ("pod", "path", "length"),
    [
        ("gpt-1-r0", "/v1/suspect", 257 << 10),
        ("gpt-1-r0", "/v1/level", 257 << 10),
        ("gpt-1-r0", "/v1/manifest", 65 << 20),
        ("operator", "/v1/seal", 5 << 10),
    ],
)
async def test_each_message_has_a_largest_body(
    certificates: Files, pod: str, path: str, length: int
) -> None:
    async with control(certificates, Handler()) as (_, port, _):
        caller = client_context(certificates(peer_dns_name(pod, JOB)))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=caller, server_hostname=peer_dns_name(POD, JOB)
        )
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        writer.close()


async def test_a_body_of_unknown_length_is_refused(certificates: Files) -> None:
    async with control(certificates, Handler()) as (_, port, _):
        operator = client_context(certificates(operator_dns_name(JOB)))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=operator, server_hostname=peer_dns_name(POD, JOB)
        )
        writer.write(
            b"POST /v1/seal HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nxxxx\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        writer.close()


@pytest.mark.parametrize(
    ("said", "code"),
    [("4", "StaleRound"), ("6", "FutureRound"), ("5", "NotMember"), ("x", "BadRequest")],
)
async def test_the_round_is_checked_before_the_body(
    certificates: Files, said: str, code: str
) -> None:
    async with control(certificates, Handler()) as (_, port, _):
        former = client_context(certificates(peer_dns_name("gpt-9-r0", JOB)))
        status, refused = await ask(
            port,
            former,
            "/v1/report",
            body=b"not even JSON",
            headers={"Holdfast-Round": said},
        )
        assert (status, refused["code"]) == (400 if said == "x" else 409, code)


# --------------------------------------------------------------------------- metrics port


@asynccontextmanager
async def plain(
    handler: Handler, **options: Any
) -> AsyncIterator[tuple[PlainServer, int, Counter[str]]]:
    dropped: Counter[str] = Counter()
    server = PlainServer(
        handler.metrics,
        dropped=lambda port, reason: dropped.update([f"{port} {reason}"]),
        **options,
    )
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port, dropped
    finally:
        await server.close()


async def scrape(port: int) -> str:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
            return await response.text()


async def test_half_requests_hold_few_descriptors_and_little_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with plain(Handler()) as (server, port, dropped):
            with ExitStack() as stack:
                for _ in range(10):
                    await asyncio.to_thread(silent, stack, port, 50, b"GET /metrics HTTP/1.1\r\n")
                    assert "holdfast_something" in await scrape(port)
                    assert server.connections <= 33
            assert dropped["metrics room"] >= 500 - 33
    assert len(caplog.records) <= 3


async def test_a_half_request_ends_after_its_time() -> None:
    async with plain(Handler()) as (_, port, _):
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            (sock,) = silent(stack, port, 1, b"GET /metrics HTTP/1.1\r\nX: ")
            assert await loop.sock_recv(sock, 1) == b""


async def test_a_flood_of_scrapes_renders_little() -> None:
    """Each answer is of a moment after its request, and most share one."""
    handler, clock = Handler(), ManualClock()
    async with plain(handler, clock=clock) as (_, port, _):
        await scrape(port)
        await scrape_with(clock, port)
        assert handler.rendered == 2
        asked = [asyncio.create_task(scrape(port)) for _ in range(16)]
        advanced = 0
        while not all(task.done() for task in asked):
            clock.advance(1.0)
            advanced += 1
            await asyncio.sleep(0.05)
        assert handler.rendered <= 2 + advanced
        assert handler.rendered < 2 + 16


async def scrape_with(clock: ManualClock, port: int) -> None:
    asked = asyncio.create_task(scrape(port))
    while not asked.done():
        clock.advance(1.0)
        await asyncio.sleep(0)
    await asked


async def test_no_request_on_the_open_port_changes_anything() -> None:
    """Handler fails on any other call than `metrics`."""
    async with plain(Handler()) as (_, port, _), aiohttp.ClientSession() as session:
        for path in ("/flushed", "/v1/inventory", "/v1/seal", "/"):
            for method in ("GET", "POST"):
                url = f"http://127.0.0.1:{port}{path}"
                async with session.request(method, url) as response:
                    assert response.status == 404


# --------------------------------------------------------------------------- the pod's socket


class Local:
    """LocalHandler that answers nothing."""

    state = RoundState(Worker(0), 2, NOW)

    def hello(self, connection: Connection) -> Ok:
        return Ok(NOW)

    def gone(self, connection: Connection) -> None:
        return

    async def request(self, connection: Connection, message: object) -> object:
        return Ok(NOW)

    def notify(self, connection: Connection, message: object) -> None:
        return


@pytest.fixture
def path() -> Iterator[Path]:
    """Short: a Unix socket's path has at most 107 bytes."""
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
    sock.settimeout(60)
    sock.connect(str(path))
    with contextlib.suppress(OSError):
        sock.sendall(text)
    sock.setblocking(False)
    return sock


HELLO = write_frame(Hello(PROTOCOL_VERSION, JOB, LocalRole.RANK, rank=Rank(0)), 1)


async def is_served(path: Path) -> bool:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(HELLO)
    await read_frame(reader)
    writer.write(write_frame(Restore(NOW, Rank(0)), 2))
    frame = await read_frame(reader)
    writer.close()
    return frame is not None and isinstance(frame.message, Ok)


async def test_unfinished_frames_before_hello_hold_few_bytes(path: Path) -> None:
    """A frame of a megabyte is refused there by its length alone."""
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


async def test_large_unfinished_frames_share_a_few_mebibytes(path: Path) -> None:
    async with intake(path, IntakeLimits(frame_seconds=HOUR)) as server:
        with ExitStack() as stack:
            for rank in (0, 1):
                hello = Hello(PROTOCOL_VERSION, JOB, LocalRole.RANK, rank=Rank(rank))
                for _ in range(8):
                    local(stack, path, write_frame(hello, 1) + (1 << 20).to_bytes(4, "big"))
                    await asyncio.sleep(0)
            assert await is_served(path), "small frames need no share"
            assert server.large_bytes == 8 << 20


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


# --------------------------------------------------------------------------- logs


def test_what_others_cause_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    seldom = logs.Seldom(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            seldom.warning("room", "no room")
        clock.advance(61)
        seldom.warning("room", "no room")
    assert [r.fields["occurred"] for r in caplog.records] == [1, 1000]  # type: ignore[attr-defined]


def test_libraries_log_a_few_lines_of_each_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure(job="j")
        for number in range(1000):
            logging.getLogger("aiohttp.server").error("Error handling request from %s", number)
            logs.info(f"own line {number}")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert sum("Error handling" in line for line in lines) == 5
    assert sum("own line" in line for line in lines) == 1000
