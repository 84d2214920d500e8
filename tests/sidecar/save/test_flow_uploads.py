"""The coordinator requests a shard as a whole while the upload of its pack is being reported."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.shards.builders import BytesSource, shard_header
from tests.support.sidecar.flows import DEADLINE_SECONDS, AcceptingMember, running_flow
from tests.support.sidecar.waiting import until
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.errors import TierError, UnavailableError, UnreadableError
from holdfast_core.ids import CheckpointId, RestartRound, ShardRef, Step
from holdfast_core.messages.schema import (
    PersistRequest,
    StoredAs,
)
from holdfast_core.store.commit import ShardUploader
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.objects import ObjectSource
from holdfast_sidecar.save.flow import own_shard

BASE = CheckpointId(Step(1), RestartRound(0))


async def test_the_upload_of_the_whole_shard_is_reported_after_that_of_the_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator ignores the first report, because it has requested the whole shard in the meantime.
    Without the second report it would wait for ever, and no later step would be persisted."""
    store = ObjectTier(MemoryObjectStore())

    def upload(self: ShardUploader, ref: ShardRef, request: PersistRequest) -> StoredAs:
        return StoredAs() if request.whole else StoredAs(BASE, ((BASE, 5),))

    monkeypatch.setattr(ShardUploader, "upload", upload)
    async with running_flow(tmp_path, AcceptingMember(), store=store) as world:
        flow = world.flow
        record = world.node.write_shard(shard_header(1000), BytesSource(bytes(1000)))
        request = PersistRequest(record.checkpoint)
        flow.add(own_shard(record, committed=True))
        flow.request_upload(request)
        await world.until_idle()
        (pack,) = sent = flow.table
        assert pack.uploaded == StoredAs(BASE, ((BASE, 5),))
        flow.request_upload(replace(request, whole=True))
        flow.reported(sent, None)
        await world.until_idle()
        (whole,) = flow.table
        assert whole.uploaded == StoredAs()
        assert not flow.is_known, "it is reported once more"
    store.close()


@pytest.mark.fault("The disk of a node has bad blocks in a shard that is to be uploaded")
async def test_a_shard_that_its_disk_does_not_return_is_given_up_and_kept(tmp_path: Path) -> None:
    store = ObjectTier(MemoryObjectStore())
    attempts: list[ShardRef] = []

    def unreadable(ref: ShardRef) -> ShardReader:
        attempts.append(ref)
        raise UnreadableError("Input/output error", may_pass=True)

    async with running_flow(tmp_path, AcceptingMember(), store=store) as world:
        record = world.node.write_shard(shard_header(1000), BytesSource(bytes(1000)))
        world.node.open_shard = unreadable  # type: ignore[method-assign, assignment]
        world.flow.add(own_shard(record, committed=True))
        step = record.header.step
        world.flow.request_upload(PersistRequest(record.checkpoint))
        await world.until_idle()
        assert world.flow.lost == {step}
        assert len(attempts) == 10, "it was to be sent five times, and was read again each time"
        assert world.node.find(record.ref) == record
    store.close()


@pytest.mark.fault("A gang restarts again and again while its sidecars upload large shards")
async def test_the_uploads_of_ended_rounds_end_and_delay_no_other_request_to_the_store(
    tmp_path: Path,
) -> None:
    """A part that is being sent cannot be ended, and the parts after it would be sent in vain."""
    go_on, begun, errors = threading.Event(), threading.Event(), list[str]()

    class Slow(MemoryObjectStore):
        def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
            begun.set()
            assert go_on.wait(DEADLINE_SECONDS)
            try:
                super().write(key, source)
            except TierError as error:
                errors.append(str(error))
                raise

    objects = Slow()
    store = ObjectTier(objects)
    async with running_flow(tmp_path, AcceptingMember(), store=store) as world:
        record = world.node.write_shard(shard_header(1000), BytesSource(bytes(1000)))
        world.flow.add(own_shard(record, committed=True))
        world.flow.request_upload(PersistRequest(record.checkpoint))
        assert await asyncio.to_thread(begun.wait, DEADLINE_SECONDS)
        await world.flow.reset()
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert await world.pools.store.run(lambda: "another request") == "another request"
        finally:
            go_on.set()
        await until(lambda: errors, "the upload ends")
        assert "ended before its last part" in errors[0]
        assert objects.objects == {}
    store.close()


@pytest.mark.fault("The coordinator gives an upload up that other workers have not finished")
async def test_a_new_request_ends_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards of the step that was given up would take the store's bandwidth first."""
    store = ObjectTier(MemoryObjectStore())

    def upload(self: ShardUploader, ref: ShardRef, request: PersistRequest) -> StoredAs:
        if ref.step == 1:
            raise UnavailableError("the store is slow")
        return StoredAs()

    monkeypatch.setattr(ShardUploader, "upload", upload)
    async with running_flow(tmp_path, AcceptingMember(), store=store) as world:
        for step in map(Step, (1, 2)):
            header = shard_header(1000, step=step)
            record = world.node.write_shard(header, BytesSource(bytes(1000)))
            world.flow.add(own_shard(record, committed=True))
            world.flow.request_upload(PersistRequest(record.checkpoint))
        await world.until_idle()
        assert [shard.step for shard in world.flow.table if shard.uploaded] == [2]
    store.close()
