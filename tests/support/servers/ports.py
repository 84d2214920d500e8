"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 10_000, 29_999
"""Below those that kernels give to outgoing connections (from 32768 on), and below node ports: a port
from there may be some connection's by the time its server binds it, or starts again on it."""


def free_port() -> int:
    """A port of loopback that is free now, and that nobody is given unasked. Raises OSError."""
    while True:
        port = random.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
