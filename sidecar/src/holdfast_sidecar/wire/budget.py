"""Memory that requests share while they are read: bounded in bytes, whoever sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """At most `limit_bytes` are taken at a time; more wait. For one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._freed = asyncio.Condition()

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold so many bytes while the context lasts. `size_bytes` may not exceed the limit."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._taken_bytes + size_bytes <= self._limit_bytes)
            self._taken_bytes += size_bytes
        try:
            yield
        finally:
            self._taken_bytes -= size_bytes
            async with self._freed:
                self._freed.notify_all()
