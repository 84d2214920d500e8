"""What the kubelet runs in every pod: startup probe and preStop hook. They import next to nothing: a
pod that starts waits for them, on processors that its trainer wants."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast_core.contract import SOCKET_NAME
from holdfast_core.shm.shared_files import connect_unix
from holdfast_sidecar.base.settings import HOOKS_SOCKET

FLUSHED = b"flushed\n"
"""What the sidecar answers when the pod may go."""


def healthz(shared: Path) -> int:
    """0 iff the sidecar accepts on its socket: not the restore barrier, which may take long."""
    try:
        connect_unix(shared, SOCKET_NAME, timeout_seconds=2.0).close()
    except OSError as error:
        sys.stderr.write(f"{shared / SOCKET_NAME}: {error}\n")
        return 1
    return 0


def pre_stop(node: Path, *, timeout_seconds: float) -> int:
    """Wait until the running sidecar has nothing left to make durable.

    It is asked through a socket in its own volume: whoever asks makes it hurry, which is nothing for
    strangers. Always 0 in the end, since the kubelet goes on anyway.
    """
    try:
        with connect_unix(node, HOOKS_SOCKET, timeout_seconds=timeout_seconds) as client:
            if client.recv(len(FLUSHED)) != FLUSHED:
                sys.stderr.write("the sidecar ended before everything was safe\n")
    except TimeoutError:
        sys.stderr.write(f"not everything was safe after {timeout_seconds:.0f} s\n")
    except OSError as error:
        sys.stderr.write(f"no sidecar to flush: {error}\n")
    return 0
