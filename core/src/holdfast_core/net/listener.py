"""TCP port of an asyncio server that unauthenticated callers cannot block.

asyncio's own servers accept every connection, allocate the buffers of a TLS session before the caller has
sent a byte, and wait up to a minute for the handshake. Here a connection needs a place (`Admission`) before
such buffers are allocated, and a handshake has a time-out of seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast_core.net.admission import Admission, Places

_BACKLOG = 1024
_PAUSE_SECONDS = 0.1
"""Pause after a failed accept. The listener continues when descriptors run out, but must not use a whole
processor meanwhile."""
_SHUTDOWN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    places: Places = field(default_factory=Places)
    handshake_seconds: float = 10.0


class Listener:
    """TCP listener with bounded connections. Each one that has a place gets a protocol from `factory`."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        *,
        context: ssl.SSLContext | None,
        limits: ListenerLimits,
        expected: Callable[[], Container[str]] = frozenset,
        closed: Callable[[str, str], None],
    ) -> None:
        """Create a listener; it accepts nothing before it is started.

        Args:
            factory: Makes the protocol of an admitted connection.
            context: TLS settings. None serves without TLS, and then every caller counts as a stranger.
            limits: Places and the time-out of the handshake.
            expected: Returns the addresses that callers are expected from.
            closed: Called with the reason and a sentence for each connection that the listener closes before
                its end or cannot accept. Strangers can cause many calls.
        """
        self._factory = factory
        self._context = context
        self._limits = limits
        self._closed = closed
        self._admission: Admission[_Connection] = Admission(
            limits.places, self._displace, expected=expected
        )
        self._listener: socket.socket | None = None
        self._acceptor: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._connections: dict[asyncio.BaseProtocol, _Connection] = {}

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
        """Return the number of connections that have a place now."""
        return len(self._admission)

    @contextmanager
    def working(self, protocol: asyncio.BaseProtocol) -> Iterator[None]:
        """Protect the connection of `protocol` from losing its place while a request is in progress.

        Without TLS, where no caller is authenticated, this has no effect.
        """
        connection = self._connections.get(protocol)
        if connection is None:
            yield
            return
        with self._admission.working(connection):
            yield

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                self._closed("accept", f"accepting a connection failed: {error}")
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            connection = _Connection(self, sock)
            self._admission.enter(connection, str(address[0]))
            task = asyncio.create_task(self._connect(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            # sock_accept does not wait while the backlog has connections. Without this turn an attacker that
            # connects without a pause would keep the event loop here, and no connection would be closed.
            await asyncio.sleep(0)

    async def _connect(self, connection: _Connection) -> None:
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
            if not connection.is_displaced:
                self._closed("handshake", f"a connection was closed during its handshake: {error}")
            self._left(connection)

    def _made(self, connection: _Connection, transport: asyncio.Transport) -> bool:
        """Return whether the connection has a place after its handshake.

        Without TLS its caller remains a stranger.
        """
        if connection.is_displaced:
            return False
        if self._context is not None:
            name = ",".join(_dns_names(transport)) or "unnamed"
            if not self._admission.is_known(connection, name):
                self._closed("room", f"a connection of {name} was refused: too many connections")
                return False
        return True

    def _opened(self, connection: _Connection, protocol: asyncio.Protocol) -> None:
        self._connections[protocol] = connection

    def _left(self, connection: _Connection, protocol: asyncio.Protocol | None = None) -> None:
        self._admission.leave(connection)
        if protocol is not None:
            self._connections.pop(protocol, None)

    def _displace(self, connection: _Connection) -> None:
        connection.displace()
        self._closed("room", "a connection was closed to make room for a newer one")


class _Connection(asyncio.Protocol):
    """Protocol between a transport and the server's protocol, which is created after admission only."""

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self.sock = sock
        self.is_displaced = False
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None

    def displace(self) -> None:
        self.is_displaced = True
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
        self._listener._opened(self, self._inner)
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
        self._listener._left(self, self._inner)
        if self._inner is not None:
            self._inner.connection_lost(error)


def _dns_names(transport: asyncio.Transport) -> tuple[str, ...]:
    certificate = transport.get_extra_info("peercert") or {}
    return tuple(v for kind, v in certificate.get("subjectAltName", ()) if kind == "DNS")
