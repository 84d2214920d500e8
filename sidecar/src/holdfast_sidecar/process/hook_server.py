"""Server of the pod's preStop hook, on a socket in the sidecar's own volume.

The trainer and the network cannot reach this socket. This matters because a connection makes the sidecar
lift its limit on background bytes, which takes bandwidth from training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast_core.shm.shared_files import listen_unix
from holdfast_sidecar.base.settings import HOOKS_SOCKET
from holdfast_sidecar.process.hooks import FLUSHED

_POLL_SECONDS = 0.2


class HookServer:
    """Server that sends `FLUSHED` to each caller as soon as `flushed()` is true, and nothing before."""

    def __init__(self, directory: Path, flushed: Callable[[], bool]) -> None:
        self._directory = directory
        self._flushed = flushed
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        listener = listen_unix(self._directory, HOOKS_SOCKET, mode=0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self._flushed():
                try:
                    async with asyncio.timeout(_POLL_SECONDS):
                        if not await reader.read(1):
                            return
                except TimeoutError:
                    continue
            writer.write(FLUSHED)
        except OSError:
            return
        finally:
            writer.close()
