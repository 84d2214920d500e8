"""The startup probe and the preStop hook that the kubelet runs in every pod.

They import as little as possible, because a starting pod waits for them and they share its processors with
the trainer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from holdfast_core.contract import SOCKET_NAME
from holdfast_core.shm.shared_files import connect_unix
from holdfast_sidecar.base.settings import HOOKS_SOCKET

_LOOK_SECONDS = 0.05
"""Pause of the startup probe between two attempts to connect."""

FLUSHED = b"flushed\n"
"""The sidecar's answer once the pod may end."""


def healthz(shared: Path, *, timeout_seconds: float) -> int:
    """Wait until the sidecar accepts connections on its socket. Return 0, or 1 after the time-out.

    The probe does not wait for the restore barrier, which may take long.
    """
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            connect_unix(shared, SOCKET_NAME, timeout_seconds=2.0).close()
        except OSError as error:
            if time.monotonic() >= until:
                sys.stderr.write(f"{shared / SOCKET_NAME}: {error}\n")
                return 1
            time.sleep(_LOOK_SECONDS)
        else:
            return 0


def pre_stop(node: Path, *, timeout_seconds: float) -> int:
    """Wait until the running sidecar has nothing left to make durable.

    The connection goes through a socket in the sidecar's own volume (see `hook_server`). The result is always
    0, since the kubelet ends the pod in any case.
    """
    try:
        with connect_unix(node, HOOKS_SOCKET, timeout_seconds=timeout_seconds) as client:
            if client.recv(len(FLUSHED)) != FLUSHED:
                sys.stderr.write("the sidecar ended before all checkpoints were safe\n")
    except TimeoutError:
        sys.stderr.write(f"some checkpoints were not safe after {timeout_seconds:.0f} s\n")
    except OSError as error:
        sys.stderr.write(f"cannot reach the sidecar to flush it: {error}\n")
    return 0
