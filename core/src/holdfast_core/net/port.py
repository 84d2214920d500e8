"""aiohttp application on a port that unauthenticated callers cannot block."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from aiohttp import web

from holdfast_core.net.listener import Listener, ListenerLimits

_LINGERING_SECONDS = 1.0
"""Seconds for which the unread rest of a request body is discarded before the connection is closed."""


class Port:
    """aiohttp application behind a Listener, whose arguments it takes.

    `idle_seconds` is the keep-alive time-out.
    """

    def __init__(
        self,
        *,
        context: ssl.SSLContext | None,
        limits: ListenerLimits | None = None,
        idle_seconds: float,
        closed: Callable[[str, str], None],
    ) -> None:
        self._context = context
        self._limits = limits or ListenerLimits()
        self._idle_seconds = idle_seconds
        self._closed = closed
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None

    async def start(self, app: web.Application, host: str, port: int) -> int:
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=self._idle_seconds,
            lingering_time=_LINGERING_SECONDS,
            # A compressed body may expand to a thousand times its size.
            auto_decompress=False,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._listener = Listener(
            server,
            context=self._context,
            limits=self._limits,
            closed=self._closed,
        )
        return await self._listener.start(host, port)

    @property
    def connections(self) -> int:
        return 0 if self._listener is None else self._listener.open

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
