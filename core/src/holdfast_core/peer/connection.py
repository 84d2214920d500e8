"""One bulk connection. It starts with mutual TLS, and the payload may leave TLS (ADR 0020).

Bytes leave TLS only in jobs with `peer.encryption: None`. The handshake on the same connection has
authenticated both ends, so there is no token that an attacker could steal or replay. Requests, replies and
the trailer, which has the digests of all chunks, stay inside TLS. Bytes from outside are accepted only if
they have these digests. An attacker on the network can read the training state and break a transfer, but
cannot change anything.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable

from holdfast_core.closing import Closing
from holdfast_core.errors import FormatError
from holdfast_core.net.tls import peer_name

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
