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


@contextmanager
def outside_tls(tried: str, outside: bool) -> Iterator[None]:
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
        raise UnavailableError(f"{tried}: outside TLS: {error or type(error).__name__}") from error
