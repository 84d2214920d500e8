"""The coordinator requests a shard as a whole while the upload of its pack is being reported."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.shards.builders import BytesSource, shard_header
from tests.support.sidecar.flows import AcceptingMember, running_flow
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.ids import RestartRound, ShardRef, Step, Worker
from holdfast_core.messages.schema import (
    PersistRequest,
    Reference,
    Uploaded,
)
from holdfast_core.store.rules import StoredAs
from holdfast_core.store.sharing import ShardUploader
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.save.flow import own_shard

BASE = Reference(Step(1), RestartRound(0), 5)


class SlowCoordinator(AcceptingMember):
    """A coordinator that answers an Uploaded message when `answered` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.notified, self.answered = asyncio.Event(), asyncio.Event()

    async def call(self, worker: Worker, message: Any, kind: type[Any]) -> Any:
        reply = await super().call(worker, message, kind)
        if isinstance(message, Uploaded):
            self.notified.set()
            await self.answered.wait()
        return reply


async def test_the_upload_of_the_whole_shard_is_reported_after_that_of_the_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator ignores the first report, because it has requested the whole shard in the meantime.
    Without the second report it would wait for ever, and no later step would be persisted."""
    store = ObjectTier(MemoryObjectStore())

    def upload(self: ShardUploader, ref: ShardRef, request: PersistRequest) -> StoredAs:
        return StoredAs() if request.whole else StoredAs(BASE, (BASE,))

    monkeypatch.setattr(ShardUploader, "upload", upload)
    coordinator = SlowCoordinator()
    async with running_flow(tmp_path, coordinator, store=store) as world:
        record = world.node.write_shard(shard_header(1000), BytesSource(bytes(1000)))
        request = PersistRequest(RestartRound(0), record.header.step, RestartRound(0))
        world.flow.add(own_shard(record, committed=True))
        world.flow.request_upload(request)
        await asyncio.wait_for(coordinator.notified.wait(), 120)
        world.flow.request_upload(replace(request, whole=True))
        coordinator.answered.set()
        await world.until_idle()
    store.close()
    reports = [m for m in coordinator.received if isinstance(m, Uploaded)]
    assert [report.references for report in reports] == [(BASE,), ()]
