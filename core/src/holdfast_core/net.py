"""TCP connections with mutual TLS 1.3 between the pods of a job, and ports that strangers cannot block.

Both sides always present a leaf certificate of the job's CA. A client connects to an address and verifies
the dNSName that the member list gives (`peer_dns_name`). A server reads the client's name from its
certificate and looks it up in its member list.

The certificates of a job do not expire (ADR 0003). The member list decides what the owner of a leaf may do.

asyncio's own servers accept every connection, allocate the buffers of a TLS session before the caller has
sent a byte, and wait up to a minute for the handshake. Here connections are bounded (`Connections`) before
such buffers are allocated, and a handshake has a time-out of seconds.

A port cannot refuse newcomers when it is full: a stranger that connects faster than handshakes time out
would keep it full. So a new connection always gets in, and replaces the oldest one that has not
authenticated itself. An honest handshake takes milliseconds, and a silent one waits until it is the oldest
(ADR 0006).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from asyncio import sslproto
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from aiohttp import web

from holdfast_core.errors import AccessDeniedError, ConfigError

READ_BYTES = 16 << 10
"""Read buffer of a TLS connection, see `use_small_read_buffers`."""
LARGE_READ_BYTES = 256 << 10
"""Read buffer of a TLS connection after `use_large_read_buffer`."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def in_directory(cls, directory: Path) -> Self:
        """Return the paths of a mounted Kubernetes TLS Secret: ca.crt, tls.crt and tls.key."""
        return cls(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")


def peer_dns_name(pod: str, job_uid: str) -> str:
    """Return the dNSName of a pod's certificate. Clients verify it as the server name."""
    return f"{pod}.{job_uid}.holdfast"


def operator_dns_name(job_uid: str) -> str:
    """Return the dNSName of the operator's client certificate for one job."""
    return f"operator.{job_uid}.holdfast"


def use_small_read_buffers() -> None:
    """Give each TLS connection of asyncio that is opened from now on a read buffer of READ_BYTES.

    By default asyncio fills 256 KiB with zeros for each connection. A process with a thousand long polls
    would need 250 MiB for that alone. A TLS record has at most 16 KiB.
    """
    sslproto.SSLProtocol.max_size = READ_BYTES


def use_large_read_buffer(transport: asyncio.BaseTransport | None) -> None:
    """Give this TLS connection of asyncio a read buffer of LARGE_READ_BYTES for what arrives from now on.

    asyncio reads from a connection once in a turn of the event loop, and at most one buffer. Where a turn
    takes 100 ms, a small buffer lets 160 KiB through in a second. Connections without TLS are left as they
    are.
    """
    # asyncio offers no public way to the protocol of a transport. It makes the buffer longer by itself.
    protocol = getattr(transport, "_ssl_protocol", None)
    if protocol is not None:
        protocol.max_size = LARGE_READ_BYTES


def load_leaf(context: ssl.SSLContext, certificate_pem: str, key_pem: str) -> None:
    """Load a certificate and its key into the context. Raises ssl.SSLError, OSError.

    The standard library accepts paths only, so the texts are written to anonymous memory files meanwhile,
    never to a disk.
    """
    with ExitStack() as stack:
        certificate = stack.enter_context(_in_memory(certificate_pem))
        key = stack.enter_context(_in_memory(key_pem))
        context.load_cert_chain(certificate, key)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a server context that requires a client certificate of the same CA. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # No client resumes a session, and a client that polls its socket would take a session ticket for a
    # reply of the server.
    context.num_tickets = 0
    return _load(context, files)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a client context that verifies the server's chain and dNSName. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = True
    return _load(context, files)


def peer_name(peer: ssl.SSLSocket | Mapping[str, Any]) -> str:
    """Return the only dNSName of the peer's verified certificate.

    Args:
        peer: A socket after its handshake, or what getpeercert() has returned.

    Raises:
        AccessDeniedError: The certificate has no dNSName or more than one.
    """
    names = _dns_names(peer if isinstance(peer, Mapping) else peer.getpeercert())
    if len(names) != 1:
        raise AccessDeniedError(
            f"certificate of the peer names {list(names)}: expected exactly one dNSName"
        )
    return names[0]


def _dns_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the dNSNames of a certificate, as getpeercert() returns it."""
    entries = (certificate or {}).get("subjectAltName", ())
    return tuple(name for kind, name in entries if kind == "DNS")


def _load(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=str(files.ca))
        context.load_cert_chain(str(files.certificate), str(files.key))
    except OSError as error:
        raise ConfigError(
            f"certificates {files.ca}, {files.certificate}, {files.key}: cannot be loaded: {error}"
        ) from error
    return context


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    descriptor = os.memfd_create("holdfast", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Largest numbers of connections of a port."""

    handshakes: int = 128
    """Connections whose caller is not authenticated yet. A further one replaces the oldest of them."""
    authenticated: int = 4096
    """Connections whose caller is authenticated. Further ones are refused."""
    per_caller: int = 32
    """Authenticated connections of one caller. A further one replaces the caller's oldest."""


class Connections(Generic[C]):
    """Table of a port's open connections. Thread-safe."""

    def __init__(self, limits: ConnectionLimits, close: Callable[[C], None]) -> None:
        """Create an empty table.

        Args:
            limits: How many connections there may be.
            close: Called without the lock for each connection that another one replaces. The connection may
                be ending at the same time.
        """
        self._limits = limits
        self._close = close
        self._lock = threading.Lock()
        self._callers: dict[C, str | None] = {}
        """The caller of each connection, None before it is authenticated. Oldest first."""

    def __len__(self) -> int:
        return len(self._callers)

    def add(self, connection: C) -> None:
        """Add a connection whose caller is not authenticated yet."""
        with self._lock:
            replaced = self._put(connection, None, self._limits.handshakes)
        for other in replaced:
            self._close(other)

    def authenticate(self, connection: C, caller: str) -> bool:
        """Record the caller of a connection.

        Returns:
            False if the connection was replaced meanwhile, or there are too many of authenticated callers.
            Then the owner closes it.
        """
        with self._lock:
            authenticated = sum(found is not None for found in self._callers.values())
            if connection not in self._callers or authenticated >= self._limits.authenticated:
                return False
            del self._callers[connection]
            replaced = self._put(connection, caller, self._limits.per_caller)
        for other in replaced:
            self._close(other)
        return True

    def remove(self, connection: C) -> None:
        """Remove a closed connection. Do nothing if it was replaced."""
        with self._lock:
            self._callers.pop(connection, None)

    def _put(self, connection: C, caller: str | None, limit: int) -> list[C]:
        """Add a connection under the lock, and return those that it replaces."""
        of_caller = [other for other, found in self._callers.items() if found == caller]
        replaced = of_caller[: max(0, len(of_caller) + 1 - limit)]
        for other in replaced:
            del self._callers[other]
        self._callers[connection] = caller
        return replaced


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
    return _dns_names(transport.get_extra_info("peercert") if transport is not None else None)


_LINGERING_SECONDS = 1.0
"""Seconds for which the unread rest of a request body is discarded before the connection is closed."""


class Port:
    """aiohttp application behind a Listener, whose arguments it takes.

    `idle_seconds` is the keep-alive time-out.
    """

    def __init__(
        self,
        *,
        context: ssl.SSLContext | None,
        limits: ListenerLimits | None = None,
        idle_seconds: float,
        closed: Callable[[str, str], None],
    ) -> None:
        self._context = context
        self._limits = limits or ListenerLimits()
        self._idle_seconds = idle_seconds
        self._closed = closed
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None

    async def start(self, app: web.Application, host: str, port: int) -> int:
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=self._idle_seconds,
            lingering_time=_LINGERING_SECONDS,
            # A compressed body may expand to a thousand times its size.
            auto_decompress=False,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._listener = Listener(
            server,
            context=self._context,
            limits=self._limits,
            closed=self._closed,
        )
        return await self._listener.start(host, port)

    @property
    def connections(self) -> int:
        return 0 if self._listener is None else self._listener.open

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
