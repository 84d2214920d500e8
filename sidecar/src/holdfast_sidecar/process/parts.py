"""The components of one sidecar, which are created once and passed to the handlers of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing.background import Pacing
from holdfast_core.tiers.base import ObjectTier
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.coordinator.commit import Coordinator
from holdfast_sidecar.gang.report import Reporter
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.restore.fill import Filler
from holdfast_sidecar.restore.rehydrate import Rehydrator
from holdfast_sidecar.save.flow import Flow
from holdfast_sidecar.save.holding import HoldTeller
from holdfast_sidecar.save.staging import Stager
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.intake import Intake


class Keeper:
    """Owner of the current fencing state. Components read it each time they need it and keep no copy."""

    def __init__(self, state: RoundState) -> None:
        self.state = state

    def current(self) -> RoundState:
        return self.state


@dataclass(slots=True)
class Parts:
    """The components of one sidecar."""

    settings: Settings
    clock: Clock
    keeper: Keeper
    pools: Pools
    pacing: Pacing
    node: DiskNodeTier
    store: ObjectTier | None
    peers: Peers
    failures: Failures
    metrics: Metrics
    gang: LocalGang
    intake: Intake
    stager: Stager
    teller: HoldTeller
    flow: Flow
    rehydrator: Rehydrator
    filler: Filler
    starter: Starter
    reporter: Reporter
    coordinator: Coordinator | None = None
    on_restored: Callable[[], None] = lambda: None
    """Called when the state of the rehydration has changed. It is set once the lifecycle exists."""

    @property
    def idle(self) -> bool:
        """Whether everything that was handed over is durable, copied and uploaded by this pod as required."""
        waiting = not self.flow.idle or self.flow.expects_commit
        return self.stager.idle and not self.stager.waiting and not waiting

    @property
    def flushed(self) -> bool:
        """Whether preStop may end: all is idle, and no rank of this pod can hand over another save."""
        running = self.gang.running_round is not None and not self.gang.done
        busy = self.coordinator is not None and not self.coordinator.idle
        return self.idle and not running and not busy
