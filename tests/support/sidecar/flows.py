"""A Flow of worker 0 of two over a real node tier, with members that accept every message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import first_round

from holdfast_core.clock import SystemClock
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import Digest, RestartRound, ShardRef, Worker
from holdfast_core.messages.schema import CopyReply, CopyRequest, Ok
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures, Metrics, Telemetry
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.save.flow import Flow
from holdfast_sidecar.wire.bulk import Members

DEADLINE_SECONDS = HANG_SECONDS


class AcceptingMember:
    """Control port of the other worker, which accepts everything."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.copied: list[ShardRef] = []

    async def call(self, worker: Worker, message: Any, kind: type[Any]) -> Any:
        if isinstance(message, CopyRequest):
            return self.copy(message)
        self.received.append(message)
        return Ok(RestartRound(0))

    def copy(self, message: CopyRequest) -> CopyReply:
        self.copied.append(message.shard)
        return CopyReply(durable=True)


class EmptyLayouts:
    """Layouts of ranks that are all `{}`."""

    async def document(self, digest: Digest) -> bytes:
        return b"{}"

    async def digests(self, digest: Digest) -> LayoutDigests:
        return LayoutDigests(digest, digest, digest)


class FlowWorld:
    """The flow, its node tier, and what it counts."""

    def __init__(
        self, folder: Path, store: ObjectTier | None, member: Any, settings: dict[str, Any]
    ) -> None:
        self.node = DiskNodeTier(folder, capacity_bytes=1 << 30)
        self.node.open()
        self.metrics = Metrics()
        self.pools = Pools(disk=1, fetch=1, store=1)
        self._settled = asyncio.Event()
        contract = contract_with(node_dir=str(folder))
        usual = {"backoff_first_seconds": 0.01, "backoff_last_seconds": 0.01}
        self.failures = Failures(lambda: None)
        layouts: Any = EmptyLayouts()
        self.current = CurrentRound(first_round())
        self.flow = Flow(
            Pod(Settings(contract, **(usual | settings)), SystemClock(), self.current),
            Tiers(self.node, store, self.pools),
            Members(member, member),
            layouts,
            Telemetry(self.metrics, self.failures),
            self._settled.set,
        )

    async def until_idle(self) -> None:
        """Wait until the flow has nothing more to do."""
        while not self.flow.idle:
            self._settled.clear()
            await asyncio.wait_for(self._settled.wait(), DEADLINE_SECONDS)


@asynccontextmanager
async def running_flow(
    folder: Path, member: Any, *, store: ObjectTier | None = None, **settings: Any
) -> AsyncIterator[FlowWorld]:
    """Run a flow. `settings` are fields of `Settings`."""
    world = FlowWorld(folder, store, member, settings)
    try:
        yield world
    finally:
        await world.flow.reset()
        world.pools.close()
