"""For which shards a member acknowledges a manifest: a coordinator that does not speak of shards in memory
takes the answer for durable ones."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.support.shards.builders import BytesSource, manifest, shard_file, shard_header
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import first_round

from holdfast_core.errors import NotFoundError, RefusedError
from holdfast_core.ids import Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import HoldNotice, LevelNotice, ManifestPut, Ok, Refusal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.record import ShardRecord
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import Caller
from holdfast_sidecar.process.control import Control

DATA = b"x" * 1000


def put(
    root: Path, *, held: bool, in_memory: bool, stored: bool = False, digesting: bool = False
) -> Mock:
    """What worker 0 makes of the manifest of its shard; its parts, to look at."""
    header = shard_header(len(DATA), job_uid=CONTRACT.job_uid, world_size=2)
    _, record = shard_file(header, DATA)
    node = DiskNodeTier(root, capacity_bytes=1 << 30)
    node.open()
    if stored:
        node.write_shard(header, BytesSource(DATA))
    pools = Pools(disk=1, copy=1, store=1)
    parts = Mock(node=node, pools=pools)
    parts.settings.contract = CONTRACT
    parts.keeper.state = first_round()
    parts.stager.find.return_value = record if in_memory else None
    parts.stager.may_find.return_value = digesting
    control = Control(parts, Mock(), Mock(), Mock())

    async def scenario() -> None:
        try:
            message = ManifestPut(RestartRound(0), header.step, text(record), held=held)
            assert await control.dispatch(Caller("gpt-0-r0"), "/v1/manifest", message) == Ok(
                RestartRound(0)
            )
        finally:
            await control.close()
            pools.close()

    asyncio.run(scenario())
    return parts


def text(record: ShardRecord) -> str:
    other = replace(record, header=replace(record.header, rank=Rank(1)))
    return manifest([record, other]).to_bytes().decode()


def test_a_shard_in_memory_is_acknowledged_when_the_manifest_allows_it(tmp_path: Path) -> None:
    parts = put(tmp_path, held=True, in_memory=True)
    parts.stager.committed.assert_called_once()
    parts.flow.committed.assert_not_called()
    assert len(parts.node.list_manifests()) == 1


@pytest.mark.parametrize(
    ("held", "in_memory"), [(False, True), (True, False)], ids=["older release", "not there"]
)
def test_a_manifest_without_its_shard_is_refused(
    tmp_path: Path, held: bool, in_memory: bool
) -> None:
    with pytest.raises(NotFoundError, match="rank 0"):
        put(tmp_path, held=held, in_memory=in_memory)


def test_a_shard_that_is_digested_again_is_busy_and_not_lost(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as refused:
        put(tmp_path, held=True, in_memory=False, digesting=True)
    assert refused.value.code is Refusal.BUSY


def test_copies_begin_at_once_when_every_shard_is_durable(tmp_path: Path) -> None:
    put(tmp_path, held=False, in_memory=False, stored=True).flow.committed.assert_called_once()


def test_copies_of_a_step_that_waited_begin_when_it_is_local(tmp_path: Path) -> None:
    parts = Mock()
    parts.keeper.state = first_round()
    control = Control(parts, Mock(), Mock(), Mock())
    step = shard_header(1).step
    notice = LevelNotice(RestartRound(0), step, RestartRound(0), Level.LOCAL)
    asyncio.run(control.dispatch(Caller("gpt-0-r0"), "/v1/level", notice))
    parts.flow.committed.assert_called_once_with(step, RestartRound(0))


async def test_a_prune_deletes_nothing_after_a_seal(tmp_path: Path) -> None:
    """The inventory that answers the seal lists it, and the next round may start from it."""
    header = shard_header(len(DATA), job_uid=CONTRACT.job_uid)
    node = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    node.open()
    node.write_shard(header, BytesSource(DATA))
    pools = Pools(disk=1, copy=1, store=1)
    parts = Mock(node=node, pools=pools)
    parts.settings.contract = CONTRACT
    parts.keeper.state = first_round()
    in_memory = Step(header.step + 1)
    parts.stager.dropped = frozenset({in_memory})
    control = Control(parts, Mock(), Mock(), Mock())
    sealed = threading.Event()
    busy = asyncio.ensure_future(pools.meta.run(sealed.wait, 30))
    await asyncio.sleep(0)
    notice = HoldNotice(RestartRound(0), prune=(header.step, in_memory))
    await control.dispatch(Caller("gpt-0-r0"), "/v1/hold", notice)
    await asyncio.sleep(0)
    parts.keeper.state = first_round().sealed_for(RestartRound(1))
    sealed.set()
    await busy
    await pools.meta.run(len, ())
    await asyncio.sleep(0)
    await pools.shard.run(len, ())
    assert len(node.list_shards()) == 1
    await control.close()
    pools.close()
