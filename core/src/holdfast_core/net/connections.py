"""Bound the connections of a port so that no caller keeps the others out. No I/O.

A port cannot refuse newcomers when it is full: a stranger that connects faster than handshakes time out would
keep it full. So a new connection always gets in, and replaces the oldest one that has not authenticated
itself. An honest handshake takes milliseconds, and a silent one waits until it is the oldest (ADR 0006).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Largest numbers of connections of a port."""

    handshakes: int = 128
    """Connections whose caller is not authenticated yet. A further one replaces the oldest of them."""
    authenticated: int = 4096
    """Connections whose caller is authenticated. Further ones are refused."""
    per_caller: int = 32
    """Authenticated connections of one caller. A further one replaces the caller's oldest."""


class Connections(Generic[C]):
    """Table of a port's open connections. Thread-safe."""

    def __init__(self, limits: ConnectionLimits, close: Callable[[C], None]) -> None:
        """Create an empty table.

        Args:
            limits: How many connections there may be.
            close: Called without the lock for each connection that another one replaces. The connection may
                be ending at the same time.
        """
        self._limits = limits
        self._close = close
        self._lock = threading.Lock()
        self._callers: dict[C, str | None] = {}
        """The caller of each connection, None before it is authenticated. Oldest first."""

    def __len__(self) -> int:
        return len(self._callers)

    def add(self, connection: C) -> None:
        """Add a connection whose caller is not authenticated yet."""
        with self._lock:
            replaced = self._put(connection, None, self._limits.handshakes)
        for other in replaced:
            self._close(other)

    def authenticate(self, connection: C, caller: str) -> bool:
        """Record the caller of a connection.

        Returns:
            False if the connection was replaced meanwhile, or there are too many of authenticated callers.
            Then the owner closes it.
        """
        with self._lock:
            authenticated = sum(found is not None for found in self._callers.values())
            if connection not in self._callers or authenticated >= self._limits.authenticated:
                return False
            del self._callers[connection]
            replaced = self._put(connection, caller, self._limits.per_caller)
        for other in replaced:
            self._close(other)
        return True

    def remove(self, connection: C) -> None:
        """Remove a closed connection. Do nothing if it was replaced."""
        with self._lock:
            self._callers.pop(connection, None)

    def _put(self, connection: C, caller: str | None, limit: int) -> list[C]:
        """Add a connection under the lock, and return those that it replaces."""
        of_caller = [other for other, found in self._callers.items() if found == caller]
        replaced = of_caller[: max(0, len(of_caller) + 1 - limit)]
        for other in replaced:
            del self._callers[other]
        self._callers[connection] = caller
        return replaced
