"""The control port under attack. The tests count connections and bytes instead of seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

import aiohttp
import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.flood import flood
from tests.support.servers.pki import Authority
from tests.support.servers.ports import silent_connections
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.sidecar.served import served

from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, ShardRef, Step, Worker
from holdfast_core.messages.codec import dumps
from holdfast_core.messages.schema import (
    Inventory,
    Ok,
    Seal,
)
from holdfast_core.net import (
    ConnectionLimits,
    ListenerLimits,
    TlsFiles,
    client_context,
    operator_dns_name,
    peer_dns_name,
    server_context,
)
from holdfast_sidecar.base.rounds import Caller, RoundState
from holdfast_sidecar.wire.bodies import BodyLimits
from holdfast_sidecar.wire.server import ControlServer

JOB = JobUid("job-1")
POD = "gpt-0-r0"
HOUR = 3600.0
NOW = RestartRound(5)
EMPTY = Inventory(Worker(0), POD, NOW, 1)


def state_of_worker_0() -> RoundState:
    """Return the state of worker 0 of a gang that worker 1 coordinates."""
    return accepted(round_message(NOW, coordinator=Worker(1)))


class Handler:
    """Handler of both servers. It records what was dispatched, and whether bodies were parsed."""

    def __init__(self, state: RoundState | None = None) -> None:
        self.state = state_of_worker_0() if state is None else state
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


def control(
    files: Files,
    handler: Handler,
    limits: ListenerLimits | None = None,
    bodies: BodyLimits | None = None,
) -> AbstractAsyncContextManager[tuple[ControlServer, int, Counter[str]]]:
    context = server_context(files(peer_dns_name(POD, JOB)))
    return served(
        lambda dropped: ControlServer(
            handler, JOB, context, limits=limits, bodies=bodies, dropped=dropped
        )
    )


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
            timeout=aiohttp.ClientTimeout(total=HANG_SECONDS),
        ) as response,
    ):
        return response.status, json.loads(await response.read())


def descriptors() -> set[str]:
    """Return the open descriptors. Those that an earlier test has left may be closed at any time."""
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.fault("Strangers connect to the control port and hold their connections")
@pytest.mark.parametrize("text", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
async def test_unauthenticated_callers_occupy_few_connections_and_block_no_member(
    certificates: Files, text: bytes
) -> None:
    """These connections never time out here, and come from the address of the operator itself."""
    limits = ListenerLimits(handshake_seconds=HOUR)
    async with control(certificates, Handler(), limits) as (server, port, dropped):
        operator = client_context(certificates(operator_dns_name(JOB)))
        before = len(descriptors())
        with ExitStack() as stack:
            for number in range(1, 11):
                await asyncio.to_thread(silent_connections, stack, port, 40, text)
                assert (await ask(port, operator))[0] == 200
                assert server.connections <= 128 + 1
                own = len(descriptors()) - before - 40 * number
                assert own <= 128 + 32, "those that were replaced are closed"
        assert dropped["control room"] >= 400 - 129


@pytest.mark.fault("Strangers connect from many addresses")
@pytest.mark.fault("A stranger connects to the control port without a pause")
@pytest.mark.parametrize("addresses", [1, 200])
async def test_a_flood_from_another_process_leaves_few_connections_open_and_blocks_no_member(
    certificates: Files, addresses: int
) -> None:
    """The attacker fills the backlog faster than the server accepts, so accepting never has to wait.

    No handshake times out. So the test fails where a full port refuses new connections.
    """
    limits = ListenerLimits(handshake_seconds=HOUR)
    async with control(certificates, Handler(), limits) as (_, port, dropped):
        operator = client_context(certificates(operator_dns_name(JOB)))
        before, most = len(descriptors()), 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(descriptors()) - before)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        with flood(port, sources=[f"127.0.0.{number}" for number in range(1, addresses + 1)]):
            while dropped["control room"] < 300:
                assert (await ask(port, operator))[0] == 200
        watching.cancel()
        assert most <= 128 + 32, "those that were replaced are closed"


@pytest.mark.fault("A handshake never ends")
async def test_a_handshake_that_does_not_come_ends(certificates: Files) -> None:
    limits = ListenerLimits(handshake_seconds=0.2)
    async with control(certificates, Handler(), limits) as (server, port, dropped):
        loop = asyncio.get_running_loop()
        before = descriptors()
        with ExitStack() as stack:
            sockets = await asyncio.to_thread(silent_connections, stack, port, 8)
            async with asyncio.timeout(45):  # asyncio itself ends a handshake after 60 s
                for sock in sockets:
                    assert await loop.sock_recv(sock, 1) == b""
        assert server.connections == 0
        assert descriptors() <= before
        assert dropped["control handshake"] == 8


@pytest.mark.fault("One pod opens many connections")
async def test_connections_of_one_pod_are_bounded(certificates: Files) -> None:
    limits = ListenerLimits(ConnectionLimits(per_caller=3))
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


@pytest.mark.fault("A former member sends a body of 63 MiB")
@pytest.mark.parametrize("path", ["/v1/copy", "/v1/report", "/v1/suspect"])
async def test_a_former_member_is_refused_before_its_body_is_sent(
    certificates: Files, path: str
) -> None:
    """The caller announces 63 MiB and waits for an answer before it sends any of them."""
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


@pytest.mark.fault("A message is larger than its kind may be")
@pytest.mark.parametrize(
    ("pod", "path", "length"),
    [
        ("gpt-1-r0", "/v1/suspect", 257 << 10),
        ("gpt-1-r0", "/v1/copy", 257 << 10),
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


async def half_sent(
    stack: contextlib.AsyncExitStack, port: int, context: ssl.SSLContext, path: str
) -> asyncio.StreamReader:
    """Announce a body of 4 MiB, send half of it, and return the reader of the answer."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=peer_dns_name(POD, JOB)
    )
    stack.callback(lambda: writer.transport.abort())  # A writer without a reference closes.
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {4 << 20}\r\n\r\n".encode())
    writer.write(bytes(4 << 19))
    return reader


@pytest.mark.fault("A member sends half of many bodies")
@pytest.mark.parametrize("path", ["/v1/report", "/v1/copy"])
async def test_half_sent_bodies_of_a_member_stop_neither_the_operator_nor_other_members(
    certificates: Files, path: str
) -> None:
    """No body times out here. Together they announce 128 MiB."""
    handler = Handler(accepted(round_message(NOW, workers=3, coordinator=Worker(0))))
    async with (
        control(
            certificates, handler, bodies=BodyLimits(body_seconds=HOUR, piece_seconds=HOUR)
        ) as (
            _,
            port,
            _,
        ),
        contextlib.AsyncExitStack() as stack,
    ):
        attacker = client_context(certificates(peer_dns_name("gpt-1-r0", JOB)))
        for _ in range(32):
            await half_sent(stack, port, attacker, path)
        operator = client_context(certificates(operator_dns_name(JOB)))
        seal = Seal(RestartRound(NOW + 1))
        assert (await ask(port, operator, "/v1/seal", body=dumps(seal)))[0] == 200
        suspect = ShardRef(JOB, Step(1), NOW, Rank(0), digest_of(b""))
        member = client_context(certificates(peer_dns_name("gpt-2-r0", JOB)))
        assert (await ask(port, member, "/v1/suspect", body=dumps(suspect)))[0] == 200
        assert handler.dispatched == [seal, suspect]


async def test_a_body_that_stops_is_given_up(certificates: Files) -> None:
    handler = Handler(accepted(round_message(NOW, workers=3, coordinator=Worker(0))))
    limits = BodyLimits(body_seconds=HOUR, piece_seconds=0.2)
    async with (
        control(certificates, handler, bodies=limits) as (_, port, _),
        contextlib.AsyncExitStack() as stack,
    ):
        member = client_context(certificates(peer_dns_name("gpt-1-r0", JOB)))
        reader = await half_sent(stack, port, member, "/v1/report")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503")


@pytest.mark.fault("A body has an unknown length")
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


@pytest.mark.fault("A caller of another round sends a body")
@pytest.mark.parametrize(
    ("header", "code"),
    [("4", "StaleRound"), ("6", "FutureRound"), ("5", "NotMember"), ("x", "BadRequest")],
)
async def test_the_round_is_checked_before_the_body(
    certificates: Files, header: str, code: str
) -> None:
    async with control(certificates, Handler()) as (_, port, _):
        former = client_context(certificates(peer_dns_name("gpt-9-r0", JOB)))
        status, refused = await ask(
            port,
            former,
            "/v1/report",
            body=b"not even JSON",
            headers={"Holdfast-Round": header},
        )
        assert (status, refused["code"]) == (400 if header == "x" else 409, code)


@pytest.mark.fault("A caller does not receive the layouts that it requests")
@pytest.mark.fault("A caller leaves while it receives a layout")
async def test_few_layouts_are_in_memory_while_callers_do_not_receive_them(
    certificates: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """No caller reads anything. A member gets half of the four, and the fifth is read after one of them left.

    That a caller leaves is no error of the server.
    """
    layout = bytes(32 << 20)  # more than the buffers of a connection take
    requested = asyncio.Semaphore(0)
    has_left = False
    seen: list[tuple[str, bool]] = []

    class Layouts(Handler):
        async def layout(self, caller: Caller, digest: Digest) -> bytes:
            seen.append((caller.pod, has_left))
            requested.release()
            return layout

    async with control(certificates, Layouts()) as (_, port, _):
        member = client_context(certificates(operator_dns_name(JOB)))
        other = client_context(certificates(peer_dns_name("gpt-1-r0", JOB)))
        path = f"/v1/layout?digest={'0' * 64}"
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        name = peer_dns_name(POD, JOB)
        async with contextlib.AsyncExitStack() as stack:
            callers = []
            for context in (member, other):
                for _ in range(4):
                    _, writer = await asyncio.open_connection(
                        "127.0.0.1", port, ssl=context, server_hostname=name
                    )
                    stack.callback(writer.transport.abort)
                    writer.write(head)
                    callers.append(writer)
                for _ in range(2):
                    await requested.acquire()
            # The four others have been waiting for as long as it takes to answer another request.
            assert (await ask(port, member))[0] == 200
            has_left = True
            for writer in callers:
                writer.transport.abort()
            await requested.acquire()
        assert seen[:4] == [("operator", False)] * 2 + [("gpt-1-r0", False)] * 2
        assert seen[4][1]
    assert [record for record in caplog.records if record.name == "aiohttp.server"] == []
