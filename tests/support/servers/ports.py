"""Free ports for servers that cannot choose one themselves, and connections that only occupy a port."""

from __future__ import annotations

import contextlib
import random
import socket
from contextlib import ExitStack

_FIRST, _LAST = 10_000, 29_999
"""Range of ports below the ephemeral ports (from 32768) and the node ports (from 30000). An ephemeral port
could be taken by an outgoing connection before a server binds it, or binds it again after a restart."""


def free_port() -> int:
    """Return a loopback port that is free now and that the kernel does not assign automatically.

    Raises OSError if no socket can be created.
    """
    while True:
        port = random.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def silent_connections(
    stack: ExitStack, port: int, count: int, text: bytes = b""
) -> list[socket.socket]:
    """Open connections to a port of this machine that send `text` and nothing more."""
    found = []
    for _ in range(count):
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        if text:
            with contextlib.suppress(OSError):
                sock.sendall(text)
        sock.setblocking(False)
        found.append(sock)
    return found
