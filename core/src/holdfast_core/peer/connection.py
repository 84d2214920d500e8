"""One bulk connection: always begun with mutual TLS, of which a stretch may lie outside.

For jobs that say `peer.encryption: None`. Both ends have proven who they are by the handshake on
this very connection, so there is no token that somebody could take or repeat. What stays inside TLS:
requests, replies, the head of the shard and the digest that its payload must have; what lies
outside is only believed when it has that digest. Whoever sits on the wire can read the state and
break a transfer, but can change nothing and acknowledge nothing.
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
"""Puts TLS around a socket, without the handshake."""


class Line:
    """`secure`, perhaps `leave` and `secure` again, `close`. Not thread-safe but for `interrupt`."""

    def __init__(self, plain: socket.socket, wrap: Wrap) -> None:
        self._plain = plain
        self._wrap = wrap
        self._sock: ssl.SSLSocket | None = None
        self._name: str | None = None

    @property
    def sock(self) -> ssl.SSLSocket:
        """Reads and writes TLS, or plain bytes after `leave`."""
        if self._sock is None:
            raise FormatError("bulk: no TLS on this connection yet; call secure() first")
        return self._sock

    @property
    def outside(self) -> bool:
        """Nothing that is read now was written by the peer for sure."""
        return self.sock.version() is None

    def secure(self) -> str:
        """Handshake; returns the peer's name. Raises OSError; AccessDeniedError where it has none,
        or another one than at the first handshake."""
        self._sock = self._wrap(self._plain if self._sock is None else self._sock)
        # Not within `_wrap`: until it returns, `interrupt` knows no socket that it could shut.
        self._sock.do_handshake()
        name = peer_name(self._sock)
        if self._name not in (None, name):
            raise AccessDeniedError(f"bulk: {self._name} came back to TLS as {name}")
        self._name = name
        return name

    def leave(self) -> None:
        """Both sides say that TLS ends here; no byte after it is taken for a part of it. Raises
        OSError."""
        self.sock.unwrap()

    def interrupt(self) -> None:
        """Wake whoever waits for the peer, from another thread."""
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
    """Where bytes came or go `outside` TLS, what goes wrong may be anybody's doing and says nothing
    about the peer or its shard: it is UnavailableError, and the next attempt stays inside and hears
    the truth."""
    try:
        yield
    except (OSError, FormatError, CorruptionError) as error:
        if not outside:
            raise
        raise UnavailableError(f"{tried}: outside TLS: {error or type(error).__name__}") from error
