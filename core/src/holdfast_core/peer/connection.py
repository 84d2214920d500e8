"""One bulk connection. It starts with mutual TLS, and the payload may leave TLS (ADR 0020).

Payloads leave TLS only in jobs with `peer.encryption: None`. The handshake on the same connection has
authenticated both ends, so there is no token that an attacker could steal or replay. Requests, replies, the
head of the shard and the digest of its payload stay inside TLS. Bytes from outside are accepted only if they
have that digest. An attacker on the network can read the training state and break a transfer, but cannot
change or acknowledge anything.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from holdfast_core.errors import (
    AccessDeniedError,
    CorruptionError,
    FormatError,
    UnavailableError,
)
from holdfast_core.net.tls import peer_name
from holdfast_core.pacing.minimum_rate import MinimumRate

Wrap = Callable[[socket.socket], ssl.SSLSocket]
"""Wraps a socket in TLS without the handshake."""


class Line:
    """Connection that can leave TLS and return to it. Only `interrupt` is thread-safe.

    Call `secure` first. After `leave`, another `secure` returns to TLS.
    """

    def __init__(self, plain: socket.socket, wrap: Wrap) -> None:
        self._plain = plain
        self._wrap = wrap
        self._sock: ssl.SSLSocket | None = None
        self._name: str | None = None

    @property
    def sock(self) -> ssl.SSLSocket:
        """Return the socket: a TLS one, or one for plain bytes after `leave`.

        Raises FormatError before `secure`.
        """
        if self._sock is None:
            raise FormatError("bulk: this connection has no TLS yet; call secure() first")
        return self._sock

    @property
    def outside(self) -> bool:
        """Return whether the connection is outside TLS now. Then received bytes are not authenticated."""
        return self.sock.version() is None

    def secure(self) -> str:
        """Enter TLS with a handshake, and return the peer's dNSName.

        Raises:
            OSError: The handshake failed.
            AccessDeniedError: The peer's certificate does not have exactly one dNSName, or has another one
                than at the first handshake.
        """
        self._sock = self._wrap(self._plain if self._sock is None else self._sock)
        # The handshake is not part of `_wrap`, so that `interrupt` has a socket to shut down meanwhile.
        self._sock.do_handshake()
        name = peer_name(self._sock)
        if self._name not in (None, name):
            raise AccessDeniedError(
                f"bulk: the certificate changed from {self._name} to {name} within one connection"
            )
        self._name = name
        return name

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RatedLine:
    """`protocol.Incoming` of a Line, inside TLS or outside, for one answer at a minimum rate.

    The time-out of the connection bounds one pause only, and a peer could send a byte before each time-out.
    """

    def __init__(self, line: Line, rate: MinimumRate) -> None:
        self._line = line
        self._rate = rate
        self._taken_bytes = 0

    def taken(self, length: int) -> None:
        """Count the payload bytes of a frame that was received whole, without its header.

        Callers that accept frames of any size call this after each frame. Otherwise a peer could extend the
        deadline with the headers of very small frames.
        """
        self._taken_bytes += length
        self._rate.received_bytes = self._taken_bytes

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read into `buffer`, and return the number of bytes. 0 means that the peer closed the connection.

        Raises UnavailableError if the peer is too slow, and OSError.
        """
        sock = self._line.sock
        return self._rate.receive(sock, sock.gettimeout(), sock.recv_into, buffer) or 0

    def version(self) -> str | None:
        """Return the TLS version, or None outside TLS."""
        return self._line.sock.version()


@contextmanager
def outside_tls(operation: str, outside: bool) -> Iterator[None]:
    """Turn errors into UnavailableError where bytes were sent or received `outside` TLS.

    An attacker on the network may have caused such an error, so it shows nothing about the peer or its
    shard. The next attempt stays inside TLS.

    Args:
        tried: What was tried, for the error text.
        outside: If False, errors are not changed.
    """
    try:
        yield
    except (OSError, FormatError, CorruptionError) as error:
        if not outside:
            raise
        raise UnavailableError(
            f"{operation}: outside TLS: {error or type(error).__name__}"
        ) from error
