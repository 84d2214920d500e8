"""Writes that found the node volume full wait here for the next deletion, for a while."""

from __future__ import annotations

import asyncio


class Room:
    """On the loop. Closed while the sidecar is sealed: nothing is deleted then."""

    def __init__(self) -> None:
        self._made = asyncio.Event()
        self._is_open = True

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Those that wait get no room."""
        self._is_open = False
        self._wake()

    def made(self) -> None:
        """Something was deleted."""
        self._wake()

    async def wait(self, seconds: float) -> bool:
        """True after a deletion; False where none came in time, or the sidecar is sealed."""
        if not self._is_open:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._made.wait()
        except TimeoutError:
            return False
        return self._is_open

    def _wake(self) -> None:
        made, self._made = self._made, asyncio.Event()
        made.set()
