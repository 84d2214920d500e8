"""The page /metrics: gauges are set to the present state when the page is requested."""

from __future__ import annotations

from holdfast_core.node.tier import BUFFER_LIMIT_BYTES, DiskNodeTier
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.gang.report import Sources, gauges
from holdfast_sidecar.process.components import Components


class MetricsPage:
    """Renderer of the page, for the plain server."""

    def __init__(
        self, metrics: Metrics, components: Components, sources: Sources, disk: DiskNodeTier
    ) -> None:
        self._metrics = metrics
        self._components = components
        self._sources = sources
        self._disk = disk

    def render(self) -> bytes:
        metrics, components = self._metrics, self._components
        metrics.level(pending=components.saves.flow.pending, round_=components.current().round)
        metrics.gang(gauges(components.current(), self._sources))
        coordinator = components.role.coordinator
        if coordinator is not None:
            metrics.committed(coordinator.levels())
            metrics.overdue(coordinator.overdue_seconds)
            metrics.overtaken(coordinator.dropped)
            if coordinator.interval is not None:
                metrics.interval(coordinator.interval)
        found = () if coordinator is None else coordinator.stragglers
        metrics.stragglers({s.rank: s.factor for s in found})
        metrics.buffers(self._disk.buffers.allocated_bytes, BUFFER_LIMIT_BYTES)
        return metrics.render()
