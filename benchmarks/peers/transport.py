"""torchft's HTTP transport: sends a state dict from one process to another on this machine."""

from __future__ import annotations

import re
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.datapath import state as states

_TIMEOUT = timedelta(seconds=120)


class TorchftReceiver:
    """The receiving process. `chunks` 0 is torchft's default: one connection."""

    def __init__(self, mib: int, chunks: int = 0) -> None:
        from torchft.checkpointing.http_transport import HTTPTransport

        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, mib, chunks), daemon=True)
        self._process.start()
        # torchft puts the host's name into the address, and that name might not resolve.
        self._address = re.sub(r"//(\[[^]]*\]|[^:/]+):", "//127.0.0.1:", str(self._pipe.recv()))
        self._transport = HTTPTransport(_TIMEOUT, chunks)

    def receive(self) -> dict[str, Any]:
        received: dict[str, Any] = self._transport.recv_checkpoint(0, self._address, 1, _TIMEOUT)
        return received

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join(30)
        self._process.kill()


def _serve(pipe: Connection, mib: int, chunks: int) -> None:
    from torchft.checkpointing.http_transport import HTTPTransport

    transport = HTTPTransport(_TIMEOUT, chunks)
    transport.send_checkpoint([1], 1, states.make(mib), _TIMEOUT)
    pipe.send(transport.address())
    pipe.recv()
