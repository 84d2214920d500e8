"""Server of the pod's preStop hook, on a socket in the sidecar's own volume.

The trainer and the network cannot reach this socket. This matters because a connection makes the sidecar
lift its limit on background bytes, which takes bandwidth from training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast_core.clock import Clock
from holdfast_core.shm.shared_files import listen_unix
from holdfast_sidecar.base.settings import HOOKS_SOCKET
from holdfast_sidecar.process.hooks import FLUSHED

_POLL_SECONDS = 0.2
_STUCK_SECONDS = 20.0
"""Time without progress after which a flush is given up. Peers that restart answer again within this time."""


class HookServer:
    """Server that sends `FLUSHED` to each caller as soon as `flushed()` is true, and nothing before.

    If `stuck()` is true for _STUCK_SECONDS, it closes the connection without the answer. A pod of a job that
    is being deleted would otherwise wait for its grace period for peers that are gone.
    """

    def __init__(
        self,
        directory: Path,
        flushed: Callable[[], bool],
        stuck: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._flushed = flushed
        self._stuck = stuck
        self._clock = clock
        self.gave_up = False
        """Whether a flush was given up."""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        listener = listen_unix(self._directory, HOOKS_SOCKET, mode=0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            moved = self._clock.monotonic()
            while not self._flushed():
                now = self._clock.monotonic()
                moved = moved if self._stuck() else now
                if now - moved >= _STUCK_SECONDS:
                    self.gave_up = True
                    return
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
