"""A server of the sidecar on a free port, with a count of the connections that it closed early."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Server(Protocol):
    """A server that listens from `start` until `close`."""

    async def start(self, host: str, port: int) -> int: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=Server)


@asynccontextmanager
async def served(
    create: Callable[[Callable[[str, str], None]], S],
) -> AsyncIterator[tuple[S, int, Counter[str]]]:
    """Start a server. Yield it with its port and the closed connections by kind of port and reason.

    Args:
        create: Returns the server. Its argument must be called for each connection that is closed early.
    """
    dropped: Counter[str] = Counter()
    server = create(lambda port, reason: dropped.update([f"{port} {reason}"]))
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port, dropped
    finally:
        await server.close()
