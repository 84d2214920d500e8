"""Free ports and addresses for servers that cannot choose one, and connections that only occupy a port."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from random import SystemRandom

from tests.support.hang import HANG_SECONDS

_FIRST, _LAST = 10_000, 29_999
"""Range of ports below the ephemeral ports (from 32768) and the node ports (from 30000). An ephemeral port
could be taken by an outgoing connection before a server binds it, or binds it again after a restart."""
_random = SystemRandom()
"""Tests and libraries seed the generator of `random`, and processes with one seed would choose alike."""
_returned: set[int] = set()
"""Ports that `free_port` has returned in this process."""


def free_port() -> int:
    """Return a loopback port that is free now and that the kernel does not assign automatically.

    A server may bind its port seconds later. Therefore no port is returned twice, and the test processes of
    pytest-xdist that run side by side choose from different ports. Raises OSError if a socket cannot be made.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = _random.randrange(_FIRST + worker, _LAST + 1, workers)
        if port in _returned:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _returned.add(port)
        return port


def free_address(port: int) -> str:
    """Return an address of this machine in 127.77.0.0 to 127.89.255.255 on which the port is free now.

    The addresses are random, because test processes that run side by side use the same port.
    """
    while True:
        parts = _random.randint(77, 89), _random.randint(0, 255), _random.randint(1, 254)
        address = "127.{}.{}.{}".format(*parts)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return address


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Yield a loopback port that refuses connections: it is bound, and nothing listens on it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def silent_connections(
    stack: ExitStack, port: int, count: int, text: bytes = b""
) -> list[socket.socket]:
    """Open connections to a port of this machine that send `text` and nothing more."""
    found = []
    for _ in range(count):
        sock = stack.enter_context(
            socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)
        )
        if text:
            with contextlib.suppress(OSError):
                sock.sendall(text)
        sock.setblocking(False)
        found.append(sock)
    return found
