"""A step that is asked for whole while the word of its pack is on its way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from tests.support.shards.builders import BytesSource, shard_header
from tests.support.sidecar.contracts import CONTRACT, UNREACHABLE_STORE
from tests.support.sidecar.rounds import first_round

from holdfast_core.clock import SystemClock
from holdfast_core.ids import RestartRound, ShardRef, Step, Worker
from holdfast_core.messages.schema import (
    Ok,
    PersistRequest,
    PreparedReply,
    Reference,
    Uploaded,
)
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.store.s3.credentials import Keys, StaticCredentials
from holdfast_core.store.tier import S3ObjectTier
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.flow import Flow, own_shard
from holdfast_sidecar.save.plan import StoredAs
from holdfast_sidecar.save.sharing import ShardUploader
from holdfast_sidecar.wire.members import Members

BASE = Reference(Step(1), RestartRound(0), 5)


def test_the_upload_of_the_whole_shard_is_reported_after_that_of_the_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator drops the first word, since it asked for the whole shard meanwhile: without the
    second one it would wait for ever, and no later step would be persisted."""
    node = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    node.open()
    record = node.write_shard(shard_header(1000), BytesSource(bytes(1000)))
    tier = S3ObjectTier(UNREACHABLE_STORE, StaticCredentials(Keys("key", "secret")))

    def upload(self: ShardUploader, ref: ShardRef, request: PersistRequest) -> StoredAs:
        return StoredAs() if request.whole else StoredAs(BASE, (BASE,))

    monkeypatch.setattr(ShardUploader, "upload", upload)

    async def scenario() -> list[Uploaded]:
        said: list[Uploaded] = []
        heard, answered, settled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def call(worker: Worker, message: Any, kind: type[Any]) -> Any:
            if isinstance(message, Uploaded):
                said.append(message)
                heard.set()
                await answered.wait()
            return PreparedReply() if kind is PreparedReply else Ok(RestartRound(0), "a")

        pools = Pools(disk=1, copy=1, store=1)
        settings = Settings(
            replace(CONTRACT, node_dir=str(tmp_path)),
            backoff_first_seconds=0.01,
            backoff_last_seconds=0.01,
        )
        flow = Flow(
            Pod(settings, SystemClock(), CurrentRound(first_round())),
            Tiers(node, tier, pools),
            Members(Mock(call=call), Mock(put=Mock(return_value=0))),
            Mock(text=AsyncMock(return_value="{}")),
            Telemetry(Metrics(), Failures(lambda: None)),
            settled.set,
        )
        request = PersistRequest(RestartRound(0), record.header.step, RestartRound(0))
        flow.add(own_shard(record, committed=True))
        flow.want(request)
        await asyncio.wait_for(heard.wait(), 120)
        flow.want(replace(request, whole=True))
        answered.set()
        while not flow.idle:
            settled.clear()
            await asyncio.wait_for(settled.wait(), 120)
        await flow.reset()
        pools.close()
        return said

    text = asyncio.run(scenario())
    tier.close()
    assert [word.references for word in text] == [(BASE,), ()]
