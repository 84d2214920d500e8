"""A Stager over a node tier of the test, without a Flow behind it."""

from __future__ import annotations

from holdfast_core.clock import SystemClock
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.save.place import RankLayouts
from holdfast_core.save.staging import Stager
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures, Metrics, NodeReports, Telemetry
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.save.components import node_place


def stager_of(
    settings: Settings,
    state: RoundState,
    node: NodeTier,
    pools: Pools,
    failures: Failures,
    metrics: Metrics | None = None,
) -> Stager:
    metrics = metrics or Metrics()
    clock = SystemClock()
    return Stager(
        node_place(
            Pod(settings, clock, CurrentRound(state)),
            node,
            RankLayouts(settings.layouts_dir, node, pools),
        ),
        pools,
        NodeReports(Telemetry(metrics, failures)),
        BackgroundLimit(settings.slots_dir, waited_for_copies=metrics.waited_for_copies),
        clock,
    )
