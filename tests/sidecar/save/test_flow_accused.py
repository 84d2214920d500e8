"""A target reports that a copy failed. Where it is corrupt, the owner reads its own shard again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.shards.shard_files import flip_bit
from tests.support.sidecar.flows import AcceptingMember, running_flow
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.sidecar.waiting import until

from holdfast_core.errors import TierError
from holdfast_core.ids import ShardRef, TierName, Worker
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import CopyReply, CopyRequest, Failure, Refusal, Refused
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_sidecar.save.flow import own_shard

SIZE = 1 << 20
CORRUPTIONS = f'holdfast_corruptions_detected_total{{tier="{TierName.NODE}"}} 1.0'


class RefusingOnce(AcceptingMember):
    """A target that refuses the first copy."""

    def __init__(self, code: Refusal) -> None:
        super().__init__()
        self._code = code

    def copy(self, message: CopyRequest) -> CopyReply:
        if not self.copied:
            self.copied.append(message.shard)
            refused = Refused(self._code, "the copy failed", message.round)
            raise_refused(refused)
        return super().copy(message)


class Full(AcceptingMember):
    """Members of which worker 1 has no room."""

    async def call(self, worker: Worker, message: Any, kind: type[Any]) -> Any:
        if worker == Worker(1):
            raise_refused(Refused(Refusal.NO_SPACE, "the node is full", message.round))
        return await super().call(worker, message, kind)


class Slow(AcceptingMember):
    """A target that needs several requests for one copy."""

    def copy(self, message: CopyRequest) -> CopyReply:
        super().copy(message)
        return CopyReply(len(self.copied) == 3, len(self.copied), 17)


class Stalled(AcceptingMember):
    """A target whose disk hangs: the copy runs, and makes no progress until it is given up once."""

    async def call(self, worker: Worker, message: Any, kind: type[Any]) -> Any:
        if isinstance(message, CopyRequest) and not self.given_up():
            return CopyReply(durable=False, pieces=1)
        return await super().call(worker, message, kind)

    given_up: Callable[[], bool]


def quarantined(folder: Path) -> list[Path]:
    return list((folder / "quarantine").glob("*.shard"))


async def test_a_good_copy_stays_and_is_offered_again(tmp_path: Path) -> None:
    peer = RefusingOnce(Refusal.CONFLICT)
    async with running_flow(tmp_path, peer) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.copied == [record.ref, record.ref]
        assert world.node.find(record.ref) is not None
        assert CORRUPTIONS not in world.metrics.render().decode()


@pytest.mark.fault("A peer sends wrong bytes")
async def test_a_bad_copy_is_quarantined_and_never_offered_again(tmp_path: Path) -> None:
    peer = RefusingOnce(Refusal.CONFLICT)
    async with running_flow(tmp_path, peer) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        flip_bit(world.node.shard_path(record.ref), 4096 + SIZE // 2)
        bad: list[ShardRef] = []
        world.flow.gone.subscribe(bad.append)
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.copied == [record.ref]
        assert world.node.find(record.ref) is None
        assert world.flow.lost == {record.header.step}, "else its upload is waited for without end"
        assert bad == [record.ref], "it is fetched again"
        assert len(quarantined(tmp_path)) == 1
        assert CORRUPTIONS in world.metrics.render().decode()


@pytest.mark.fault("A worker that has no room for copies is no target any more")
async def test_a_failed_copy_to_a_worker_that_gets_none_any_more_is_no_failure(
    tmp_path: Path,
) -> None:
    """The coordinator would prune for the room of that worker, and the job show it, for the whole round."""
    peer = Full()
    async with running_flow(tmp_path, peer) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.add(own_shard(record, committed=True))
        await until(lambda: world.failures.current, "the copy fails")
        world.current.state = accepted(
            round_message(version=2, workers=3, copies={Worker(0): (Worker(2),)})
        )
        world.flow.wake()
        await world.until_idle()
        assert peer.copied == [record.ref]
        assert world.failures.current == ()


@pytest.mark.fault(
    "A disk does not delete the shard of a step that was dropped while it was written"
)
async def test_a_shard_of_a_dropped_step_is_deleted_when_the_disk_lets_it(tmp_path: Path) -> None:
    """Nothing else would delete it in this round. The sidecar does not end for it."""
    peer = AcceptingMember()
    async with running_flow(tmp_path, peer) as world:
        delete, errors = world.node.delete_shard, [TierError("deleting shard: Input/output error")]

        def refusing(ref: ShardRef) -> None:
            if errors:
                raise errors.pop()
            delete(ref)

        world.node.delete_shard = refusing  # type: ignore[method-assign]
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.forget((record.header.step,))
        world.flow.add(own_shard(record))
        await world.until_idle()
        assert world.node.find(record.ref) is None
        assert (errors, peer.copied, world.failures.current) == ([], [], ())


@pytest.mark.fault("A target cannot copy now (busy, full, sealed)")
@pytest.mark.parametrize("code", [Refusal.BUSY, Refusal.NO_SPACE, Refusal.SEALED])
async def test_a_target_that_cannot_copy_now_is_asked_again(tmp_path: Path, code: Refusal) -> None:
    peer = RefusingOnce(code)
    async with running_flow(tmp_path, peer) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.copied == [record.ref, record.ref]


@pytest.mark.fault("A round is sealed while a large shard is read again")
async def test_a_shard_that_is_read_again_delays_no_seal(tmp_path: Path) -> None:
    """A seal reads the record of the round and lists what is here, within the operator's patience."""
    reads, go_on = threading.Event(), threading.Event()
    async with running_flow(tmp_path, RefusingOnce(Refusal.CONFLICT)) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        opened = world.node.open_shard

        def slow(ref: ShardRef) -> DiskShardReader:
            reads.set()
            assert go_on.wait(HANG_SECONDS)
            return opened(ref)

        world.node.open_shard = slow  # type: ignore[method-assign]
        world.flow.add(own_shard(record, committed=True))
        assert await asyncio.to_thread(reads.wait, HANG_SECONDS)
        try:
            await asyncio.wait_for(world.pools.read.run(len, ()), HANG_SECONDS)
        finally:
            go_on.set()
        await world.until_idle()


@pytest.mark.fault("A node loses a shard that is to be copied")
async def test_a_shard_that_its_owner_has_no_more_holds_up_no_other(tmp_path: Path) -> None:
    peer = RefusingOnce(Refusal.NOT_FOUND)
    async with running_flow(tmp_path, peer) as world:
        gone, later = (
            world.node.write_shard(shard_header(SIZE, step=step), BytesSource(payload(SIZE)))
            for step in (1, 2)
        )
        world.node.delete_shard(gone.ref)
        fetched: list[ShardRef] = []
        world.flow.gone.subscribe(fetched.append)
        for record in (gone, later):
            world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.copied == [gone.ref, later.ref]
        assert [shard.ref for shard in world.flow.shards()] == [later.ref]
        assert world.flow.lost == {1}
        assert fetched == [gone.ref]


@pytest.mark.fault("A target prunes a step before the sender of its copy does")
async def test_a_copy_of_a_step_that_the_target_has_pruned_is_no_failure(tmp_path: Path) -> None:
    """The target prunes the step before this node, which no longer copies it then. Here it is not pruned."""
    failures: list[tuple[Failure, ...]] = []

    class Pruning(RefusingOnce):
        def copy(self, message: CopyRequest) -> CopyReply:
            failures.append(world.failures.current)
            return super().copy(message)

    async with running_flow(tmp_path, Pruning(Refusal.NOT_FOUND)) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert failures == [(), ()]


@pytest.mark.fault("A target's disk hangs while it copies (the owner reports it and asks again)")
async def test_a_copy_without_progress_is_reported_and_requested_again(tmp_path: Path) -> None:
    peer = Stalled()
    async with running_flow(tmp_path, peer, disk_quiet_seconds=0.05) as world:
        peer.given_up = lambda: bool(world.failures.current)
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.copied == [record.ref]


async def test_a_copy_that_takes_long_is_requested_until_it_is_durable(tmp_path: Path) -> None:
    peer = Slow()
    async with running_flow(tmp_path, peer) as world:
        record = world.node.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        world.flow.add(own_shard(record, committed=True))
        await world.until_idle()
        assert peer.copied == [record.ref] * 3
        assert 'holdfast_sent_bytes_total{tier="peer"} 17.0' in world.metrics.render().decode()
