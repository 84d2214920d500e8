"""The lifecycle of one sidecar with real pools, fencing state and node tier.

Stand-ins replace the tasks that a seal stops, the writes of slots and the start of ranks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.contracts import contract_with

from holdfast_core.ids import JobUid, RestartRound, ShardRef, Worker
from holdfast_core.messages.schema import Round
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.save.place import RankLayouts
from holdfast_core.shards.file import ShardRecord
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Signal
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures, Metrics, Telemetry
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.process.components import Components
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.save.plan import OwnShard


class SlowNode:
    """A node tier whose writes of the round file wait until the test sets `go_on`."""

    def __init__(self, tier: DiskNodeTier) -> None:
        self._tier = tier
        self.writing = threading.Event()
        self.go_on = threading.Event()
        self.list_shards: Callable[[], Any] = tier.list_shards
        self.find: Callable[[ShardRef], ShardRecord | None] = tier.find
        self._write_round = tier.records.write_round
        tier.records.write_round = self._write  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def _write(self, round_: RestartRound, version: int) -> None:
        self.writing.set()
        assert self.go_on.wait(HANG_SECONDS)
        self._write_round(round_, version)


class PlayedStager:
    """A stager that records how long a seal waits for the writes of slots."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.settle_seconds: list[float] = []
        self.write_seconds: list[float] = []
        self.recovered: list[RestartRound] = []
        """The round of each call that frees the slots of older rounds."""
        self.wait: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)

    def seal(self) -> None:
        return

    def recover(self, state: RoundState, durable: object) -> None:
        self.recovered.append(state.round)

    async def settle(self, seconds: float) -> bool:
        self.settle_seconds.append(seconds)
        await self.wait()
        return True

    async def write_waiting(self, seconds: float) -> bool:
        self.write_seconds.append(seconds)
        await self.wait()
        return True


class World:
    """The lifecycle of worker 0, with stand-ins for the parts that copy bytes and start ranks."""

    def __init__(
        self,
        node: SlowNode,
        folder: Path,
        round_: int = 4,
        job_uid: JobUid | None = None,
        store: ObjectTier | None = None,
    ) -> None:
        self.node: Any = node
        self.clock = ManualClock()
        self.pools = Pools(disk=2, fetch=1, store=1)
        self.stager = PlayedStager()
        self.stopped: list[str] = []
        self.rehydrations: list[Round] = []
        self.ended: list[RestartRound] = []
        """The round of each end of the coordination."""
        self.evaluated: list[bool] = []
        """One entry for each time that the start of the ranks was considered."""
        self.current = CurrentRound(RoundState(Worker(0), 1, RestartRound(round_), "gpt-0-r0"))
        contract = contract_with(shared_dir=str(folder))
        if job_uid is not None:
            contract = replace(contract, job_uid=job_uid)
        settings = Settings(contract, settle_seconds=30.0, seal_seconds=45.0)
        changed: Signal[[]] = Signal()
        self.failures = Failures(changed)
        self.gang = LocalGang(1)
        self.copied: list[OwnShard] = []
        """Shards of the restore point that are to be copied."""
        self.progressed: Signal[[]] = Signal()
        """Called when the progress of a restore has changed."""
        self.rehydrator = SimpleNamespace(
            reset=self._nothing, begin=self.rehydrations.append, restored=None
        )
        components: Any = Components(
            self.current,
            SimpleNamespace(  # type: ignore[arg-type]
                stager=self.stager,
                layouts=RankLayouts(settings.layouts_dir, self.node, self.pools),
                flow=SimpleNamespace(reset=self._nothing, pending=0, add=self.copied.append),
            ),
            SimpleNamespace(  # type: ignore[arg-type]
                progressed=self.progressed,
                filler=SimpleNamespace(stop=self.stopped.append),
                rehydrator=self.rehydrator,
            ),
            self.gang,
            SimpleNamespace(  # type: ignore[arg-type]
                reset=self._nothing,
                begin=lambda: None,
                end_ranks=self._nothing,
                has_launcher=True,
                evaluate=lambda: self.evaluated.append(True),
            ),
            SimpleNamespace(  # type: ignore[arg-type]
                begin=lambda message: None, end=self._end
            ),
            changed,
        )
        self.lifecycle = Lifecycle(
            Pod(settings, self.clock, self.current),
            self.node,  # type: ignore[arg-type]
            Tiers(self.node, store, self.pools),
            components,
            BackgroundLimit(folder, self.clock.monotonic),
            Telemetry(Metrics(), self.failures),
        )

    async def _end(self) -> None:
        self.ended.append(self.current.state.round)

    async def _nothing(self, *_: object) -> None:
        return
