"""What the kubelet runs in every pod: startup probe and preStop hook. They import next to nothing: a
pod that starts waits for them, on processors that its trainer wants."""

from __future__ import annotations

import json
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from threading import Event

from holdfast_core.clock import SystemClock
from holdfast_core.contract import SOCKET_NAME
from holdfast_sidecar.settings import PORTS_FILE

_POLL_SECONDS = 0.2


def healthz(shared: Path) -> int:
    """0 iff the sidecar accepts on its socket: not the restore barrier, which may take long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(2.0)
        try:
            client.connect(str(shared / SOCKET_NAME))
        except OSError as error:
            sys.stderr.write(f"{shared / SOCKET_NAME}: {error}\n")
            return 1
    return 0


def pre_stop(shared: Path, *, timeout_seconds: float) -> int:
    """Wait until the running sidecar has nothing on its way any more. Always 0 in the end: the
    kubelet goes on anyway, and says so badly."""
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_seconds
    try:
        port = int(json.loads((shared / PORTS_FILE).read_text())["metrics"])
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"no sidecar to flush: {error}\n")
        return 0
    pause = Event()
    while clock.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/flushed", timeout=2):
                return 0
        except urllib.error.HTTPError:
            pause.wait(_POLL_SECONDS)
        except OSError as error:
            sys.stderr.write(f"the sidecar does not answer: {error}\n")
            return 0
    sys.stderr.write(f"not everything was safe after {timeout_seconds:.0f} s\n")
    return 0
