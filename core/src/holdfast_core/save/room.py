"""Lets writes that found the node volume full wait for the next deletion."""

from __future__ import annotations

import asyncio


class Room:
    """Signal that space was freed on the node volume, for use on the event loop.

    It is closed while the sidecar is sealed, because nothing is deleted then.
    """

    def __init__(self) -> None:
        self._made = asyncio.Event()
        self._is_open = True

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Let all present waits return False, and later ones until `open`."""
        self._is_open = False
        self._wake()

    def made(self) -> None:
        """Wake all waits after a deletion."""
        self._wake()

    async def wait(self, seconds: float) -> bool:
        """Wait for a deletion. Return False if there is none within `seconds` or the sidecar is sealed."""
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
