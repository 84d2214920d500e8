"""A process that opens connections to a port of this machine without a pause, as an attacker does.

A flood from the process of the server would take turns with it and could never fill its backlog.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_PROGRAM = """
import collections, contextlib, itertools, socket, sys

port, text, *sources = sys.argv[1:]
held = collections.deque()
for source in itertools.cycle(sources):
    sock = socket.socket()
    sock.bind((source, 0))
    with contextlib.suppress(OSError):  # the server may have closed it already
        sock.connect(("127.0.0.1", int(port)))
        sock.sendall(text.encode())
    held.append(sock)
    if len(held) > 600:
        held.popleft().close()
    if len(held) == 2:
        print("connected", flush=True)
"""


@contextmanager
def flood(port: int, text: bytes = b"", sources: Sequence[str] = ("127.0.0.1",)) -> Iterator[None]:
    """Open connections from other process until the context ends. Each sends `text` and then nothing.

    Args:
        port: The port on 127.0.0.1.
        text: ASCII bytes that each connection sends first.
        sources: Loopback addresses that the connections come from in turn.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(port), text.decode(), *sources],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        yield
    finally:
        process.kill()
        process.communicate()
