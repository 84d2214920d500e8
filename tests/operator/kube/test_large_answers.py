"""Long answers of the API server arrive in few turns of a busy event loop (ADR 0005)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from asyncio import sslproto
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.pki import Authority

from holdfast_core.net import READ_BYTES, load_leaf, use_small_read_buffers
from holdfast_operator.kube.api import KubeAccess, KubeApi

SIZE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """A server over TLS that answers one request, with a JSON text of SIZE_BYTES, in a thread of its own."""

    access: KubeAccess
    requested: threading.Event
    held: threading.Event
    """The answer is sent when it is set."""
    sent: threading.Event
    """Set when the whole answer is in the buffers of the kernel, which have room for it."""
    reads: list[int]
    """Bytes of each read of the client. asyncio reads from a connection once in a turn of the event loop."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    original = sslproto.SSLProtocol.max_size
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", original)  # so that it is restored
    use_small_read_buffers()
    reads, read = list[int](), sslproto.SSLProtocol.buffer_updated

    def counted(protocol: sslproto.SSLProtocol, count: int) -> None:
        reads.append(count)
        read(protocol, count)

    monkeypatch.setattr(sslproto.SSLProtocol, "buffer_updated", counted)
    authority = Authority()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = authority.leaf("127.0.0.1")
    load_leaf(context, certificate.decode(), key.decode())
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(HANG_SECONDS)  # so that a test that fails before its request ends
    body = b'"' + b"x" * (SIZE_BYTES - 2) + b'"'

    requested, held, sent = (threading.Event() for _ in range(3))

    def serve() -> None:
        plain, _ = listening.accept()
        with plain, context.wrap_socket(plain, server_side=True) as connection:
            connection.recv(1 << 16)
            requested.set()
            assert held.wait(HANG_SECONDS)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            sent.set()

    thread = threading.Thread(target=serve)
    thread.start()
    with listening:
        access = KubeAccess(
            f"https://127.0.0.1:{listening.getsockname()[1]}",
            ca_pem=authority.certificate_pem.decode(),
        )
        yield Server(access, requested, held, sent, reads)
        thread.join()


async def hold(server: Server) -> None:
    """Hold the event loop while the whole answer is sent, as the passes over jobs do."""
    while not server.requested.is_set():  # noqa: ASYNC110 - it is set by another thread
        await asyncio.sleep(0.01)
    server.held.set()
    assert server.sent.wait(HANG_SECONDS)


@pytest.mark.fault(
    "Passes and calls for many jobs make the turns of the event loop long, so that the events of "
    "the API server wait"
)
@pytest.mark.parametrize("kind", ["stream", "page"])
async def test_a_long_answer_needs_few_turns_of_the_event_loop(server: Server, kind: str) -> None:
    """With buffers of READ_BYTES it would need 64 turns, and a watch would be minutes late."""
    api, seconds = KubeApi(server.access), HANG_SECONDS
    await api.start()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(hold(server))
            if kind == "stream":
                async with api.stream("/watch", {}, total_seconds=seconds) as response:
                    assert len(await response.read()) == SIZE_BYTES
            else:
                assert len(await api.get_page("/list", {}, seconds=seconds)) == SIZE_BYTES - 2
        assert sum(server.reads) > SIZE_BYTES
        assert len(server.reads) < SIZE_BYTES // READ_BYTES // 2
    finally:
        await api.close()
