"""A peer says that what it got is corrupt: whose fault it is, only the own copy can tell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.shards.shard_files import flip_bit
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import first_round

from holdfast_core.clock import SystemClock
from holdfast_core.errors import CorruptionError
from holdfast_core.ids import RestartRound, ShardRef, TierName, Worker
from holdfast_core.messages.schema import (
    Member,
    Ok,
    PreparedReply,
)
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.record import ShardRecord
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.flow import Flow, own_shard
from holdfast_sidecar.wire.members import Members

SIZE = 1 << 20


class BadMemory:
    """The peer that gets the copies; it finds fault with the first of them."""

    def __init__(self) -> None:
        self.puts: list[ShardRef] = []

    def put(self, member: Member, round_: RestartRound, ref: ShardRef) -> None:
        self.puts.append(ref)
        if len(self.puts) == 1:
            raise CorruptionError(f"bulk: {member.pod} refused {ref}: CRC32C does not match")


async def run(tier: DiskNodeTier, record: ShardRecord, bulk: Any, metrics: Any) -> None:
    """Until the flow has nothing more to do with the shard."""
    pools = Pools(disk=1, copy=1, store=1)
    settled = asyncio.Event()

    async def call(worker: Worker, message: Any, kind: type[Any]) -> Any:
        return PreparedReply() if kind is PreparedReply else Ok(RestartRound(0), "a")

    settings = Settings(CONTRACT, backoff_first_seconds=0.01, backoff_last_seconds=0.01)
    flow = Flow(
        Pod(settings, SystemClock(), CurrentRound(first_round())),
        Tiers(tier, None, pools),
        Members(Mock(call=call), bulk),
        Mock(text=AsyncMock(return_value="{}")),
        Telemetry(metrics, Failures(lambda: None)),
        settled.set,
    )
    flow.add(own_shard(record, committed=True))
    while not flow.idle:
        settled.clear()
        await asyncio.wait_for(settled.wait(), 120)
    await flow.reset()
    pools.close()


@pytest.fixture
def tier(tmp_path: Path) -> DiskNodeTier:
    made = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    made.open()
    return made


def written(tier: DiskNodeTier) -> ShardRecord:
    return tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))


def test_a_good_copy_stays_and_is_sent_again(tier: DiskNodeTier) -> None:
    bulk, metrics = BadMemory(), Mock()
    asyncio.run(run(tier, written(tier), bulk, metrics))
    assert len(bulk.puts) == 2
    assert tier.find(bulk.puts[0]) is not None
    metrics.corruption.assert_not_called()


def test_a_bad_copy_is_quarantined_and_never_sent_again(tier: DiskNodeTier, tmp_path: Path) -> None:
    bulk, metrics = BadMemory(), Mock()
    record = written(tier)
    (path,) = tmp_path.rglob("*.shard")
    flip_bit(path, 4096 + SIZE // 2)
    asyncio.run(run(tier, record, bulk, metrics))
    assert len(bulk.puts) == 1
    assert tier.find(bulk.puts[0]) is None
    assert len(list((tmp_path / "quarantine").glob("*.shard"))) == 1
    metrics.corruption.assert_called_once_with(TierName.NODE)
