"""A listener with TLS under strangers."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from asyncio.sslproto import SSLProtocol

from holdfast_core.net import ConnectionLimits, Listener, ListenerLimits

STRANGERS = 200
AT_ONCE = 8


def protocols() -> int:
    return sum(type(one) is SSLProtocol for one in gc.get_objects())


def test_failed_handshakes_leave_no_buffers_to_the_collector_of_cycles() -> None:
    """Each has 256 KiB. A sidecar collects seldom, and a flood brought it to 537 MiB."""

    async def scenario() -> int:
        listener = Listener(
            asyncio.Protocol,
            context=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            limits=ListenerLimits(ConnectionLimits(handshakes=AT_ONCE)),
            closed=lambda reason, text: None,
        )
        port = await listener.start("127.0.0.1", 0)
        gc.disable()
        try:
            for number in range(STRANGERS):
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    if number % 2:
                        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    await asyncio.sleep(0)
            while listener.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return protocols() - before
        finally:
            gc.enable()
            await listener.close()

    gc.collect()
    before = protocols()  # an earlier test of the process may have connections
    assert asyncio.run(scenario()) <= AT_ONCE
