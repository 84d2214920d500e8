"""Messages on the bulk port, and its connections.

A connection begins with mutual TLS 1.3 and carries one request after another:

    u32 length in network order, then that many bytes of JSON: ReadObject
    u32 length, then JSON: ReadReply
    the bytes of the range, without frames; none if only the length was requested

A server that cannot send all bytes closes the connection; the caller's next request gets the reason. If
request and reply have `plain` set, both sides leave TLS after the reply, and the connection ends with the
bytes (ADR 0020).

Bytes leave TLS only in jobs with `peer.encryption: None`. The handshake on the same connection has
authenticated both ends, so there is no token that an attacker could steal or replay. Requests, replies and
the trailer, which has the digests of all chunks, stay inside TLS. Bytes from outside are accepted only if
they have these digests. An attacker on the network can read the training state and break a transfer, but
cannot change anything.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.errors import (
    AccessDeniedError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.ids import RestartRound
from holdfast_core.messages.codec import body_limit_bytes, dumps, loads
from holdfast_core.messages.common import refusal_of
from holdfast_core.messages.schema import ReadReply, Refusal, Refused
from holdfast_core.net import peer_name
from holdfast_core.pacing import MinimumRate
from holdfast_core.tasks import Closing

Wrap = Callable[[socket.socket], ssl.SSLSocket]
"""Wraps a socket in TLS without the handshake."""


class Line(Closing):
    """Connection that can leave TLS. Only `interrupt` is thread-safe. Call `secure` first."""

    def __init__(self, plain: socket.socket, wrap: Wrap) -> None:
        self._plain = plain
        self._wrap = wrap
        self._sock: ssl.SSLSocket | None = None

    @property
    def sock(self) -> ssl.SSLSocket:
        """Return the socket: a TLS one, or one for plain bytes after `leave`.

        Raises FormatError before `secure`.
        """
        if self._sock is None:
            raise FormatError("bulk: this connection has no TLS yet; call secure() first")
        return self._sock

    def secure(self) -> str:
        """Enter TLS with a handshake, and return the peer's dNSName.

        Raises:
            OSError: The handshake failed.
            AccessDeniedError: The peer's certificate does not have exactly one dNSName.
        """
        self._sock = self._wrap(self._plain)
        # The handshake is not part of `_wrap`, so that `interrupt` has a socket to shut down meanwhile.
        self._sock.do_handshake()
        return peer_name(self._sock)

    def leave(self) -> None:
        """End TLS. Both sides mark its end, so no later byte is taken for a part of it. Raises OSError."""
        self.sock.unwrap()

    def interrupt(self) -> None:
        """End the connection from another thread. A thread that waits for the peer gets an error."""
        for sock in (self._sock, self._plain):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self._sock, self._plain):
            if sock is not None:
                sock.close()


T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Largest piece of a shard that is read, sent or received at once. A CopyWriter takes no larger one."""
SEND_BYTES = 1 << 20
"""Bytes of one call to the socket. Larger slices do not make TLS faster, and the socket's time-out applies to
each slice."""
_SOCKET_BUFFER_BYTES = 4 << 20
_BACKOFF_SECONDS = 0.2
_LENGTH = struct.Struct("!I")


class Incoming(Protocol):
    """Readable side of a connection."""

    def recv_into(self, buffer: memoryview, /) -> int: ...


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """Time-outs and other options of the calling side."""

    connect_seconds: float = 5.0
    """Time-out of the TCP connection, and also of its TLS handshake."""
    io_seconds: float = 30.0
    """Time-out of each wait for the socket after that."""
    grace_seconds: float = 60.0
    """Time for one answer. One more second is added for each 64 KiB of it."""
    attempts: int = 4
    """Attempts that may fail one after the other without any progress."""
    plain: bool = False
    """Allow bytes outside TLS, if the other side's policy allows it, too. After a failure, further attempts
    stay inside."""
    background: bool = False
    """See ReadObject."""
    clock: Clock = field(default_factory=SystemClock)


@dataclass(frozen=True, slots=True)
class Peer:
    """Address of one peer's bulk server, and how to call it."""

    address: str
    port: int
    server_hostname: str
    ssl_context: ssl.SSLContext
    options: BulkOptions

    def __str__(self) -> str:
        return f"{self.server_hostname} ({self.address}:{self.port})"

    def rate(self, what: str) -> MinimumRate:
        """Return the minimum rate of one answer whose time starts now. `what` names it in error texts."""
        clock = self.options.clock
        return MinimumRate(
            f"{what} from {self}", clock, clock.monotonic(), self.options.grace_seconds
        )

    def connected(self) -> Line:
        """Return a connection after its TLS handshake. Raises OSError, AccessDeniedError."""
        plain = socket.create_connection(
            (self.address, self.port), timeout=self.options.connect_seconds
        )
        line = Line(plain, self._wrap)
        try:
            tune(plain)
            line.secure()
            line.sock.settimeout(self.options.io_seconds)
        except BaseException:
            line.close()
            raise
        return line

    def _wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        return self.ssl_context.wrap_socket(
            plain, server_hostname=self.server_hostname, do_handshake_on_connect=False
        )


class Attempts:
    """Bound on attempts that fail one after the other."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failed = 0

    def progressed(self) -> None:
        self._failed = 0

    def failed(self, error: UnavailableError) -> None:
        """Wait for a random back-off. Raises UnavailableError if this was the last attempt."""
        self._failed += 1
        if self._failed >= self._most:
            raise UnavailableError(
                f"all {self._most} attempts failed, the last with: {error}"
            ) from error
        time.sleep(random.uniform(0, _BACKOFF_SECONDS * 2**self._failed))


def send_message(sock: socket.socket, message: object) -> None:
    """Send one message. Raises OSError."""
    data = dumps(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(sock: Incoming, kind: type[T]) -> T | None:
    """Read the next message. Return None if the peer closed the connection before it.

    Raises FormatError, OSError.
    """
    head = bytearray(_LENGTH.size)
    if not receive_into(sock, memoryview(head), may_end=True):
        return None
    (length,) = _LENGTH.unpack(head)
    limit = body_limit_bytes(kind)
    if not 0 < length <= limit:
        raise FormatError(f"bulk: {kind.__name__} of {length} bytes, expected 1..{limit}")
    body = bytearray(length)
    receive_into(sock, memoryview(body))
    return loads(kind, bytes(body))


def receive_into(sock: Incoming, buffer: memoryview, *, may_end: bool = False) -> bool:
    """Fill the whole `buffer`.

    Args:
        sock: Delivers the bytes.
        buffer: Receives them.
        may_end: Return False if the stream ends before the first byte, instead of raising an error.

    Raises:
        OSError: The connection failed or ended early.
    """
    filled = 0
    while filled < len(buffer):
        count = sock.recv_into(buffer[filled:])
        if count == 0:
            if may_end and filled == 0:
                return False
            raise ConnectionResetError(
                f"the peer closed the connection at {filled} of {len(buffer)} bytes"
            )
        filled += count
    return True


def tune(sock: socket.socket) -> None:
    """Set the socket options of a bulk connection: no delay, large buffers for a fast network, keep-alive."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connection_error(error: OSError, operation: str) -> HoldfastError:
    """Return AccessDeniedError if a side has refused the other's certificate, otherwise UnavailableError.

    Args:
        error: The error of the connection.
        operation: The operation that failed, for the error text.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessDeniedError(
            f"{operation}: the certificate of the peer was not accepted: {error.verify_message}"
        )
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return AccessDeniedError(
            f"{operation}: the peer refused the certificate of this side: {error.reason}"
        )
    return UnavailableError(f"{operation}: {error or type(error).__name__}")


def refusal(error: HoldfastError) -> ReadReply:
    """Return the reply that carries `error` to the caller."""
    return ReadReply(refused=Refused(refusal_of(error), str(error)[:2000], RestartRound(0)))


def raise_refusal(refused: Refused, operation: str) -> None:
    """Raise the error that a refusal of ReadObject stands for.

    Raises:
        CorruptionError: The server's own copy is corrupt.
        NotFoundError: The server does not have the shard.
        UnavailableError: The server is busy, or its disk failed.
        RefusedError: Another refusal.
    """
    text = f"{operation}: {refused.message}"
    match refused.code:
        case Refusal.CONFLICT:
            raise CorruptionError(text)
        case Refusal.NOT_FOUND:
            raise NotFoundError(text)
        case Refusal.BUSY:
            raise UnavailableError(text)
        case _:
            raise RefusedError(refused.code, text)
