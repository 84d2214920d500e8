"""Limit on the memory that all requests together take while they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """Budget of `limit_bytes` for one event loop. Callers wait while their bytes do not fit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._freed = asyncio.Condition()

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Take `size_bytes` until the context ends. They must not exceed the limit of the budget."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._taken_bytes + size_bytes <= self._limit_bytes)
            self._taken_bytes += size_bytes
        try:
            yield
        finally:
            self._taken_bytes -= size_bytes
            async with self._freed:
                self._freed.notify_all()
