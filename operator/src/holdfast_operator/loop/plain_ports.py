"""The operator's two ports without TLS: /metrics for Prometheus, /healthz and /readyz for the kubelet.

Every pod of the cluster may be able to reach them, so the number of connections is limited: a new
connection at the limit closes the oldest one. No connection uses a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web
from prometheus_client import generate_latest

from holdfast_core.clock import Clock
from holdfast_core.net.listener import Port
from holdfast_operator.base import logs
from holdfast_operator.base.metrics import Metrics

SILENT_WATCH_SECONDS = 180.0
"""Silence of one watch after which /readyz fails. The API server sends each watch a bookmark about once
a minute, so a longer silence means that the operator does not see changes in the cluster."""
_IDLE_SECONDS = 5.0
_RENDERED_SECONDS = 0.2
"""Seconds for which one rendering of /metrics is reused. The rate of requests is not limited."""


class PlainPorts:
    """The two listening ports. `metrics_port` and `health_port` are valid between start and close."""

    def __init__(
        self,
        metrics: Metrics,
        watch_age_seconds: Callable[[], float | None],
        stalled_watches: Callable[[], Sequence[str]],
        clock: Clock,
    ) -> None:
        self._metrics = metrics
        self._watch_age_seconds = watch_age_seconds
        self._stalled_watches = stalled_watches
        self._clock = clock
        self._log_changes = logs.Changed()
        self._rendered: tuple[float, bytes] | None = None
        self._ports = {
            name: Port(
                context=None,
                idle_seconds=_IDLE_SECONDS,
                closed=partial(self._closed, name),
            )
            for name in ("metrics", "health")
        }
        self.metrics_port = 0
        self.health_port = 0

    def _closed(self, port: str, reason: str, message: str) -> None:
        self._metrics.dropped_connection(port, reason)
        self._log_changes.warning_once(reason, message, port=port)

    async def start(self, host: str, metrics_port: int, health_port: int) -> None:
        """Listen on both ports; port 0 lets the system choose. Raises OSError if a port is in use."""
        metrics = web.Application(client_max_size=1024)
        metrics.router.add_get("/metrics", self._serve_metrics)
        health = web.Application(client_max_size=1024)
        health.router.add_get("/healthz", self._alive)
        health.router.add_get("/readyz", self._ready)
        self.metrics_port = await self._ports["metrics"].start(metrics, host, metrics_port)
        self.health_port = await self._ports["health"].start(health, host, health_port)

    def connections(self, port: str) -> int:
        """Return the number of open connections of the port `metrics` or `health`."""
        return self._ports[port].connections

    async def close(self) -> None:
        for port in self._ports.values():
            await port.close()

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        now = self._clock.monotonic()
        if self._rendered is None or now >= self._rendered[0] + _RENDERED_SECONDS:
            self._rendered = now, generate_latest(self._metrics.registry)
        return web.Response(
            body=self._rendered[1],
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _ready(self, request: web.Request) -> web.Response:
        """Answer 503 while a watch is not in sync or has been silent for too long. A standby is ready, too.

        /healthz answers 200 all the same: the operator continues with the copies it has, and the kubelet
        must not restart it because an API server is silent.
        """
        age = self._watch_age_seconds()
        if age is None:
            return web.Response(status=503, text="the watches are not in sync yet\n")
        if age > SILENT_WATCH_SECONDS:
            return web.Response(status=503, text=f"a watch has been silent for {age:.0f} s\n")
        return web.Response(text=f"the newest event of a watch is {age:.0f} s old\n")

    async def _alive(self, request: web.Request) -> web.Response:
        """Answer 503 if a watch's loop stands still. Any answer shows that the event loop runs."""
        stalled = self._stalled_watches()
        if stalled:
            return web.Response(
                status=503, text=f"these watches neither receive nor fail: {', '.join(stalled)}\n"
            )
        return web.Response(text="ok\n")
