"""TCP port of an asyncio server that unauthenticated callers cannot block.

asyncio's own servers accept every connection, allocate the buffers of a TLS session before the caller has
sent a byte, and wait up to a minute for the handshake. Here connections are bounded (`Connections`) before
such buffers are allocated, and a handshake has a time-out of seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast_core.net.connections import ConnectionLimits, Connections

_BACKLOG = 1024
_PAUSE_SECONDS = 0.1
"""Pause after a failed accept. The listener continues when descriptors run out, but must not use a whole
processor meanwhile."""
_SHUTDOWN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    handshake_seconds: float = 10.0


class Listener:
    """TCP listener with bounded connections. Each one gets a protocol from `factory` after its handshake."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        *,
        context: ssl.SSLContext | None,
        limits: ListenerLimits,
        closed: Callable[[str, str], None],
    ) -> None:
        """Create a listener; it accepts nothing before it is started.

        Args:
            factory: Makes the protocol of a connection.
            context: TLS settings. None serves without TLS, and then no caller is ever authenticated.
            limits: Numbers of connections and the time-out of the handshake.
            closed: Called with the reason and a sentence for each connection that the listener closes before
                its end or cannot accept. Strangers can cause many calls.
        """
        self._factory = factory
        self._context = context
        self._limits = limits
        self._closed = closed
        self._connections: Connections[_AcceptedConnection] = Connections(
            limits.connections, self._replaced
        )
        self._listener: socket.socket | None = None
        self._acceptor: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the bound port. Raises OSError."""
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._acceptor = asyncio.create_task(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cancel the handshakes. The owner of `factory` ends the requests."""
        tasks = [*self._handshakes, *([self._acceptor] if self._acceptor is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    @property
    def open(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._closed("accept", f"accepting a connection failed: {error}")
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            connection = _AcceptedConnection(self, sock)
            self._connections.add(connection)
            task = asyncio.create_task(self._connect(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            # sock_accept does not wait while the backlog has connections. Without this turn an attacker that
            # connects without a pause would keep the event loop here, and no connection would be closed.
            await asyncio.sleep(0)

    async def _connect(self, connection: _AcceptedConnection) -> None:
        loop = asyncio.get_running_loop()
        tls = self._context is not None
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                connection.sock,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.handshake_seconds if tls else None,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS if tls else None,
            )
        except OSError as error:
            if not connection.is_replaced:
                self._closed("handshake", f"a connection was closed during its handshake: {error}")
            self._left(connection)
            # The traceback holds the frame that waited, and the frame holds the error. Without this, the TLS
            # buffers of a failed handshake, 256 KiB, would stay until the collector of cycles runs.
            error.__traceback__ = None

    def _made(self, connection: _AcceptedConnection, transport: asyncio.Transport) -> bool:
        """Return whether the connection may go on after its handshake."""
        if connection.is_replaced:
            return False
        if self._context is not None:
            caller = ",".join(dns_names(transport)) or "unnamed"
            if not self._connections.authenticate(connection, caller):
                self._closed("room", f"a connection of {caller} was refused: too many connections")
                return False
        return True

    def _left(self, connection: _AcceptedConnection) -> None:
        self._connections.remove(connection)

    def _replaced(self, connection: _AcceptedConnection) -> None:
        connection.replace()
        self._closed("room", "a connection was closed to make room for a newer one")


class _AcceptedConnection(asyncio.Protocol):
    """Protocol between a transport and the server's protocol, which is created after the handshake."""

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self.sock = sock
        self.is_replaced = False
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None

    def replace(self) -> None:
        self.is_replaced = True
        if self._transport is not None:
            self._transport.abort()
        else:
            with contextlib.suppress(OSError):  # this ends the handshake
                self.sock.shutdown(socket.SHUT_RDWR)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._listener._made(self, transport):
            transport.abort()
            return
        self._inner = self._listener._factory()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener._left(self)
        if self._inner is not None:
            self._inner.connection_lost(error)


def dns_names(transport: asyncio.BaseTransport | None) -> tuple[str, ...]:
    """Return the dNSNames of the caller's certificate. A closed connection and one without TLS have none."""
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    if not certificate:
        return ()
    return tuple(v for kind, v in certificate.get("subjectAltName", ()) if kind == "DNS")
