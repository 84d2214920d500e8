"""The page /metrics: gauges are set to the present state when the page is requested."""

from __future__ import annotations

from holdfast_core.node.tier import DiskNodeTier
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.gang.report import Reporter
from holdfast_sidecar.process.journeys import Journeys


class MetricsPage:
    """Renderer of the page, for the plain server."""

    def __init__(
        self, metrics: Metrics, journeys: Journeys, reporter: Reporter, disk: DiskNodeTier
    ) -> None:
        self._metrics = metrics
        self._journeys = journeys
        self._reporter = reporter
        self._disk = disk

    def render(self) -> bytes:
        metrics, journeys = self._metrics, self._journeys
        metrics.level(pending=journeys.saves.flow.pending, round_=journeys.current().round)
        metrics.gang(self._reporter.now())
        coordinator = journeys.role.coordinator
        if coordinator is not None:
            metrics.committed(coordinator.levels())
            metrics.overdue(coordinator.overdue_seconds)
        metrics.buffers(*self._disk.buffer_bytes())
        return metrics.render()
