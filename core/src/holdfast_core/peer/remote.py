"""Connections to one peer, its replies and repeated attempts, for clients of the bulk protocol."""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from holdfast_core.errors import FormatError, HoldfastError, UnavailableError
from holdfast_core.pacing.minimum_rate import MinimumRate
from holdfast_core.peer.connection import Line, RatedLine
from holdfast_core.peer.protocol import (
    BulkFrame,
    BulkOptions,
    Incoming,
    Kind,
    connection_error,
    raise_reply,
    receive_frame,
    tune,
)

T = TypeVar("T")

_BACKOFF_SECONDS = 0.2


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

    def throttle(self, length: int) -> None:
        """Block until the throttle of the options allows `length` more bytes."""
        if self.options.throttle is not None:
            self.options.throttle(length)

    def rated(self, line: Line, what: str) -> RatedLine:
        """Return a reader of one answer whose time starts now. `what` names the answer in error texts."""
        clock = self.options.clock
        grace_seconds = self.options.grace_seconds
        return RatedLine(
            line, MinimumRate(f"{what} from {self}", clock, clock.monotonic(), grace_seconds)
        )

    def wrap(self, plain: socket.socket) -> ssl.SSLSocket:
        """Wrap a socket in TLS without the handshake."""
        return self.ssl_context.wrap_socket(
            plain, server_hostname=self.server_hostname, do_handshake_on_connect=False
        )


def with_attempts(peer: Peer, attempt: Callable[[bool], T]) -> T:
    """Call `attempt` until it succeeds, with a random back-off after each UnavailableError.

    Args:
        attempt: Its argument is whether it may leave TLS. Only the first call may, if the options allow it.

    Raises:
        UnavailableError: All attempts failed.
        Exception: Any other error of `attempt`, without a further attempt.
    """
    last: HoldfastError | None = None
    for number in range(peer.options.attempts):
        if number:
            time.sleep(random.uniform(0, _BACKOFF_SECONDS * 2**number))
        try:
            return attempt(peer.options.plain and number == 0)
        except UnavailableError as error:
            last = error
    raise UnavailableError(
        f"all {peer.options.attempts} attempts failed, the last with: {last}"
    ) from last


@contextmanager
def connect(peer: Peer) -> Iterator[Line]:
    """Yield a connection to the peer after its TLS handshake.

    An OSError in the body is raised as an AccessDeniedError or an UnavailableError (see
    connection_error).
    """
    try:
        with socket.create_connection(
            (peer.address, peer.port), timeout=peer.options.connect_seconds
        ) as plain:
            tune(plain)
            with Line(plain, peer.wrap) as line:
                line.secure()
                line.sock.settimeout(peer.options.io_seconds)
                yield line
    except OSError as error:
        raise connection_error(error, f"bulk: {peer}") from error


def expect_reply(sock: Incoming, peer: Peer, request: BulkFrame) -> BulkFrame:
    """Read the REPLY to `request`. Raises FormatError, OSError, and the error that the REPLY carries."""
    reply = receive_frame(sock)
    if reply is None:
        raise ConnectionResetError("the peer closed the connection before its reply")
    if reply.kind is not Kind.REPLY or reply.ref != request.ref:
        raise FormatError(f"bulk: {peer} answered {request.kind.name} with {reply.kind.name}")
    raise_reply(reply, f"bulk: {request.kind.name} of {request.ref} at {peer}")
    return reply


def expect_data(sock: ssl.SSLSocket | RatedLine, peer: Peer, request: BulkFrame) -> BulkFrame:
    """Read the header of the next frame. Inside TLS, raise the error of a REPLY that came instead of DATA.

    Raises FormatError, OSError, and the error that the REPLY carries.
    """
    frame = receive_frame(sock)
    if frame is None:
        raise ConnectionResetError("the peer closed the connection within the shard")
    if frame.kind is Kind.REPLY and sock.version() is not None:
        raise_reply(frame, f"bulk: reading {request.ref} from {peer}")
    return frame
