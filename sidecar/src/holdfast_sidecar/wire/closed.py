"""Count and log the connections that a server of this sidecar closes before their end."""

from __future__ import annotations

from collections.abc import Callable

from holdfast_sidecar.base import logs


class ClosedConnections:
    """Record of one port. Strangers can cause many such connections, so few of them are logged."""

    def __init__(self, port: str, counted: Callable[[str, str], None]) -> None:
        """Create the record. `counted` is called with the port and the reason of each connection."""
        self._port = port
        self._counted = counted
        self._log = logs.RateLimited()

    def __call__(self, reason: str, message: str) -> None:
        self._counted(self._port, reason)
        self._log.warning(reason, message, port=self._port)
