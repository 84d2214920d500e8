"""Blocking HTTP/1.1 to one endpoint: pooled connections, bodies by sendfile, replies by recv_into.

Shards pass through this module, so it avoids copies and computes no hashes. It never retries and never
follows a redirect, and it is independent of S3. The standard library parses status lines, headers and
chunked bodies. It bounds the size and number of headers; this module bounds the bodies. A transport
failure raises UnavailableError, except that a certificate that does not verify raises CertificateError.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.errors import ConfigError, CorruptionError, TierError, UnavailableError
from holdfast_core.pacing import MinimumRate, RatedSocket
from holdfast_core.tasks import Closing
from holdfast_core.tiers.objects import FileRange, unreadable

SLICE_BYTES = 1 << 20
"""Bytes that one `sendall` passes to a socket. The idle time-out bounds the whole call, so each slice must
be sent within it."""


class CertificateError(TierError):
    """The server's certificate does not verify: it is expired or has another name or authority."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time-outs of all waits."""

    connect_seconds: float = 5.0
    """Limit of the TCP handshake, and of each wait of the TLS handshake."""
    idle_seconds: float = 60.0
    """Longest time without progress of a transfer. It does not limit the whole transfer."""
    grace_seconds: float = 300.0
    """Limit of a whole reply, plus one second for every 64 KiB received (pacing). A request
    body needs no such limit: a socket is writable again only after a third of its buffer was sent."""


Body = bytes | tuple[bytes | FileRange, ...]
"""Bytes, or pieces that are sent in order. Pieces of files are sent without a copy."""


def body_length(body: Body | None) -> int:
    """Return the length of a body in bytes, for the Content-Length header."""
    return sum(
        len(piece) if isinstance(piece, bytes) else piece.length_bytes for piece in _pieces(body)
    )


def _pieces(body: Body | None) -> tuple[bytes | FileRange, ...]:
    return body if isinstance(body, tuple) else (body or b"",)


class HttpReply(Closing):
    """A reply whose body has not been read yet. It is a context manager, and it must be closed.

    Its connection returns to the pool only if the body was read to its end.
    """

    def __init__(
        self,
        pool: HttpPool,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        reusable: bool,
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._response = response
        self._reusable = reusable
        self._closed = False
        self.status: int = response.status
        self.headers: dict[str, str] = {k.lower(): v for k, v in response.getheaders()}

    @property
    def content_length(self) -> int | None:
        """Body bytes still to be read; None if the server sent no Content-Length."""
        length: int | None = self._response.length
        return length

    def read_into(self, buffer: memoryview) -> int:
        """Read into `buffer` and return the number of bytes; 0 at the end of the body.

        The body may end too early, so the caller must compare the total with the expected length. Raises
        UnavailableError.
        """
        with self._pool.transport_errors("reading the reply"):
            return self._response.readinto(buffer)

    def read(self, limit_bytes: int) -> bytes:
        """Return the whole body. Raises UnavailableError if it is incomplete or longer than the limit."""
        announced = self.content_length
        with self._pool.transport_errors("reading the reply"):
            data = self._response.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise UnavailableError(
                f"reply of {self._pool.name}: more than {limit_bytes} bytes, refused"
            )
        if announced is not None and len(data) != announced:
            raise UnavailableError(
                f"reply of {self._pool.name}: ended after {len(data)} of {announced} bytes"
            )
        return data

    def close(self) -> None:
        """Return the connection to the pool if it can carry another request, else close it.

        Further calls do nothing: a connection that was returned twice would be used by two callers.
        """
        if self._closed:
            return
        self._closed = True
        if self._reusable and self._response.isclosed() and not self._response.will_close:
            self._pool.put_back(self._connection)
        else:
            self._connection.close()


class HttpPool:
    """Pool of connections to one `host:port`. Safe for use by many threads.

    At most `max_idle` idle connections are kept. The number of connections in use is not limited.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        secure: bool,
        ca_file: str | None = None,
        timeouts: Timeouts | None = None,
        max_idle: int = 8,
        clock: Clock | None = None,
        sent: Callable[[int], object] | None = None,
    ) -> None:
        """Create the pool without opening a connection. Raises ConfigError for an invalid endpoint.

        Args:
            endpoint: `host:port`, `host` or `[v6]:port`.
            secure: Whether to use TLS.
            ca_file: CA certificates of the server; None uses those of the system.
            timeouts: Time-outs of all waits.
            max_idle: Largest number of idle connections that are kept.
            clock: Clock of the pace of replies.
            sent: Receives the number of body bytes that were handed to the network. Any thread may call
                it.
        """
        self._host, self._port = split_endpoint(endpoint, secure=secure)
        self.name = endpoint
        self._secure = secure
        self._ca_file = ca_file
        self._timeouts = timeouts or Timeouts()
        self._max_idle = max_idle
        self._clock = clock or SystemClock()
        self._sent = sent or _ignore_progress
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._lock = threading.Lock()
        self._tls: tuple[tuple[int, int] | None, ssl.SSLContext] | None = None

    def request(
        self, method: str, target: str, headers: Mapping[str, str], body: Body | None = None
    ) -> HttpReply:
        """Send one request and return its reply, whatever the status.

        Raises:
            UnavailableError: The transport failed; the outcome of the request is unknown.
            CertificateError: The server's certificate does not verify.
            ConfigError: The CA certificate cannot be read.
            CorruptionError: A file of the body became shorter while it was sent.
        """
        connection = self._take()
        try:
            with self.transport_errors(f"{method} {target.partition('?')[0]}"):
                connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders()
                whole = _send_body(connection.sock, body, self._timeouts.idle_seconds, self._sent)
                response = self._response(connection, method)
                return HttpReply(self, connection, response, reusable=whole)
        except BaseException:
            connection.close()
            raise

    def _response(
        self, connection: http.client.HTTPConnection, method: str
    ) -> http.client.HTTPResponse:
        what = f"{method} at {self.name}: reading the reply"
        rate = MinimumRate(what, self._clock, self._clock.monotonic(), self._timeouts.grace_seconds)

        def response(sock: socket.socket, **more: str) -> http.client.HTTPResponse:
            # HTTPResponse uses only the socket's makefile.
            return http.client.HTTPResponse(RatedSocket(sock, rate), **more)  # type: ignore[arg-type]

        connection.response_class = response  # type: ignore[assignment]  # only called, never subclassed
        return connection.getresponse()

    def put_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < self._max_idle:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed together with its reply."""
        with self._lock:
            idle, self._max_idle = list(self._idle), 0
            self._idle.clear()
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def transport_errors(self, doing: str) -> Iterator[None]:
        """Translate exceptions of sockets, TLS and the HTTP parser into errors of holdfast_core.errors.

        `doing` names in the message what was tried.
        """
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise CertificateError(
                f"{doing} at {self.name}: the server's certificate does not verify: "
                f"{error.verify_message}; check the CA certificate of the store and its dates"
            ) from error
        except TimeoutError as error:
            raise UnavailableError(
                f"{doing} at {self.name}: no reply in time (connect "
                f"{self._timeouts.connect_seconds:g} s, silence {self._timeouts.idle_seconds:g} s)"
            ) from error
        except http.client.RemoteDisconnected as error:
            raise UnavailableError(f"{doing} at {self.name}: {error}") from error
        except (http.client.BadStatusLine, http.client.UnknownProtocol):
            # The exception's text quotes the server, which may repeat the credentials that it received.
            # As the cause it would be shown in a traceback.
            raise UnavailableError(
                f"{doing} at {self.name}: the status line of the reply is not of HTTP/1.1"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            text = str(error) or type(error).__name__
            raise UnavailableError(f"{doing} at {self.name}: {text}") from error

    def _take(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._open()
            if _is_quiet(connection.sock):
                return connection
            connection.close()

    def _open(self) -> http.client.HTTPConnection:
        connect = self._timeouts.connect_seconds
        connection: http.client.HTTPConnection
        if self._secure:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=connect, context=self._tls_context()
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=connect)
        try:
            with self.transport_errors("connecting"):
                connection.connect()
                connection.sock.settimeout(self._timeouts.idle_seconds)
        except BaseException:
            connection.close()
            raise
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        """Return the TLS context. Make it again if the CA file has changed, because Secrets are rotated.

        Raises ConfigError if the CA file cannot be read.
        """
        try:
            signature = None
            if self._ca_file is not None:
                info = Path(self._ca_file).stat()
                signature = (info.st_mtime_ns, info.st_ino)
            with self._lock:
                if self._tls is None or self._tls[0] != signature:
                    context = ssl.create_default_context(cafile=self._ca_file)
                    context.minimum_version = ssl.TLSVersion.TLSv1_2
                    self._tls = (signature, context)
                return self._tls[1]
        except OSError as error:
            raise ConfigError(
                f"CA certificate {self._ca_file} of the store at {self.name}: {error}"
            ) from error


def split_endpoint(endpoint: str, *, secure: bool) -> tuple[str, int]:
    """Return host and port of `host:port`, `host` or `[v6]:port`. Raises ConfigError."""
    host, port = endpoint, 443 if secure else 80
    if not endpoint.endswith("]"):
        head, colon, tail = endpoint.rpartition(":")
        if colon:
            if not (tail.isascii() and tail.isdigit() and 0 < int(tail) < 65536):
                raise ConfigError(f"store endpoint {endpoint!r}: expected host:port, no scheme")
            host, port = head, int(tail)
    if not host or any(c in host for c in "/@?# \t\r\n"):
        raise ConfigError(f"store endpoint {endpoint!r}: expected host:port, no scheme")
    return host.strip("[]"), port


def _is_quiet(sock: socket.socket | None) -> bool:
    """Return whether an idle connection is usable.

    Anything to read on it means that the server closed it or sent bytes that no request asked for.
    """
    if sock is None:
        return False
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLRDHUP)
    return not poller.poll(0)


def _ignore_progress(_count: int) -> None:
    """Do nothing: the default of `sent`."""


def _send_body(
    sock: socket.socket, body: Body | None, idle_seconds: float, sent: Callable[[int], object]
) -> bool:
    """Send the body and return whether all of it was sent.

    False means that the server replied, or closed the connection, before it had read the body. Its reply
    must then be read, and the connection cannot be used again. Raises OSError.
    """
    try:
        return all(_send_piece(sock, piece, idle_seconds, sent) for piece in _pieces(body))
    except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
        # The server's reply may be in the receive buffer; it tells more than "broken pipe".
        return False


def _send_piece(
    sock: socket.socket,
    piece: bytes | FileRange,
    idle_seconds: float,
    sent: Callable[[int], object],
) -> bool:
    if isinstance(piece, FileRange):
        if isinstance(sock, ssl.SSLSocket):
            return _send_slices(sock, piece, sent)
        return _send_file(sock, piece, idle_seconds, sent)
    view = memoryview(piece)
    for start in range(0, len(view), SLICE_BYTES):
        data = view[start : start + SLICE_BYTES]
        sock.sendall(data)
        sent(len(data))
    return True


def _send_slices(sock: ssl.SSLSocket, body: FileRange, sent: Callable[[int], object]) -> bool:
    # SSLSocket.sendfile sends 8 KiB at a time, which takes three times the CPU of this loop.
    buffer = memoryview(bytearray(min(SLICE_BYTES, body.length_bytes)))
    position, stop = body.offset, body.offset + body.length_bytes
    while position < stop:
        try:
            count = os.preadv(body.fd, [buffer[: min(len(buffer), stop - position)]], position)
        except OSError as error:
            raise unreadable(error) from error
        if count == 0:
            raise CorruptionError("shard file became shorter while it was sent")
        sock.sendall(buffer[:count])
        sent(count)
        position += count
    return True


def _send_file(
    sock: socket.socket, body: FileRange, idle_seconds: float, sent: Callable[[int], object]
) -> bool:
    # A socket with a time-out is in non-blocking mode, so sendfile needs a poll before it continues.
    poller = select.poll()
    poller.register(sock, select.POLLOUT | select.POLLIN)
    position, stop = body.offset, body.offset + body.length_bytes
    while position < stop:
        try:
            count = os.sendfile(sock.fileno(), body.fd, position, stop - position)
        except BlockingIOError:
            events = poller.poll(idle_seconds * 1000)
            if not events:
                raise TimeoutError("the server stopped reading") from None
            if events[0][1] & select.POLLIN:
                return False
            continue
        except OSError:
            _expect_readable(body.fd, position)
            raise
        if count == 0:
            raise CorruptionError("shard file became shorter while it was sent")
        sent(count)
        position += count
    return True


def _expect_readable(fd: int, position: int) -> None:
    """Raise UnreadableError if a file and not the connection has failed. One call moves bytes of both."""
    try:
        os.pread(fd, 1, position)
    except OSError as error:
        raise unreadable(error) from error
