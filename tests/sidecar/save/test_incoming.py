"""Copies that a target makes at the request of their owner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.clock import SystemClock
from holdfast_core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Digest, JobUid, RestartRound, ShardRef, Step, TierName, Worker
from holdfast_core.messages.schema import CopyReply, CopyRequest, Member, Refusal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardRecord
from holdfast_core.store.download.shard import Copied
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import Caller
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import PEER_FULL, reason_of
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.save.incoming import IncomingCopies

ROUND = RestartRound(5)
OWNER = Caller("gpt-0-r0")
SIZE = 1000
LAYOUT = b"a layout" * 1000


class Owner:
    """Bulk port of the owners. A copy from OWNER waits until it may end."""

    def __init__(self, node: NodeTier) -> None:
        self._node = node
        self.error: BaseException | None = None
        self.copies = 0
        self.layouts = 0
        self.started = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.published: Callable[[], object] = lambda: None

    async def layout(self, worker: Worker, digest: Digest) -> bytes:
        self.layouts += 1
        return LAYOUT

    def copy(
        self, member: Member, ref: ShardRef, *, background: bool, may_go_on: Callable[[], None]
    ) -> Copied:
        assert background
        self.copies += 1
        self.started.release()
        may_go_on()
        if member.pod == OWNER.pod:
            assert self.may_end.wait(HANG_SECONDS)
        may_go_on()
        if self.error is not None:
            raise self.error
        header = shard_header(SIZE, step=ref.step)
        record = self._node.write_shard(header, BytesSource(payload(SIZE)))
        self.published()
        return Copied(record, 77)


class World:
    def __init__(self, call_seconds: float, node: NodeTier) -> None:
        self.node = node
        self.owner = Owner(self.node)
        self.pools = Pools(disk=1, fetch=1, store=1)
        self.round = CurrentRound(accepted(round_message(ROUND, workers=3), worker=1))
        settings = Settings(contract_with(worker=Worker(1)), call_seconds=call_seconds)
        members: Any = SimpleNamespace(bulk=self.owner, control=self.owner)
        self.dropped: set[int] = set()
        """The steps that plans of this round have dropped."""
        self.copies = IncomingCopies(
            Pod(settings, SystemClock(), self.round),
            Tiers(self.node, None, self.pools),
            members,
            lambda step: step in self.dropped,
        )

    def take(self, ref: ShardRef, layout: Digest | None = None) -> asyncio.Task[CopyReply]:
        return asyncio.create_task(self.copies.take(OWNER, CopyRequest(ROUND, ref, layout)))

    async def until_started(self) -> None:
        assert await asyncio.to_thread(self.owner.started.acquire, timeout=HANG_SECONDS)


@asynccontextmanager
async def world(call_seconds: float = 180.0, node: NodeTier | None = None) -> AsyncIterator[World]:
    made = World(call_seconds, node or ScratchTier())
    try:
        yield made
    finally:
        made.owner.may_end.set()
        await made.copies.close()
        made.pools.close()


def shard(step: int = 7) -> ShardRecord:
    return ScratchTier().write_shard(shard_header(SIZE, step=step), BytesSource(payload(SIZE)))


async def test_the_layout_is_durable_before_the_copy_and_requested_once() -> None:
    async with world() as here:
        here.owner.may_end.set()
        layout = digest_of(LAYOUT)
        assert await here.take(shard().ref, layout) == CopyReply(durable=True, received_bytes=77)
        assert here.node.get_layout(layout) == LAYOUT
        assert await here.take(shard().ref, layout) == CopyReply(durable=True)
        assert (here.owner.layouts, here.owner.copies) == (1, 1)


@pytest.mark.fault("A target of copies has no room for a layout")
async def test_a_full_node_says_so(tmp_path: Path) -> None:
    """The coordinator prunes more steps while a node reports that it, or a target of its copies, is full."""
    node = DiskNodeTier(tmp_path, capacity_bytes=len(LAYOUT))
    node.open()
    async with world(node=node) as here:
        here.owner.may_end.set()
        with pytest.raises(RefusedError) as refused:
            await here.take(shard().ref, digest_of(LAYOUT))
        assert refused.value.code is Refusal.NO_SPACE
        assert reason_of(TierName.PEER, refused.value) == PEER_FULL
        assert here.owner.copies == 0


async def test_requests_for_one_shard_wait_for_one_copy() -> None:
    async with world() as here:
        first = here.take(shard().ref)
        await here.until_started()
        second = here.take(shard().ref)
        here.owner.may_end.set()
        assert [await first, await second] == [CopyReply(True, received_bytes=77)] * 2
        assert here.owner.copies == 1


@pytest.mark.fault("An owner stalls while a target copies from others too")
async def test_an_owner_that_stalls_delays_no_copy_of_another_owner() -> None:
    async with world() as here:
        stalled = [here.take(shard(step).ref) for step in (7, 8, 9)]
        for _ in stalled:
            await here.until_started()
        request = CopyRequest(ROUND, shard(10).ref)
        assert await here.copies.take(Caller("gpt-2-r0"), request) == CopyReply(
            True, received_bytes=77
        )
        here.owner.may_end.set()
        assert [(await task).durable for task in stalled] == [True] * 3


async def test_a_copy_that_is_here_is_not_made_again() -> None:
    async with world() as here:
        record = here.node.write_shard(shard_header(SIZE, step=7), BytesSource(payload(SIZE)))
        assert await here.take(record.ref) == CopyReply(durable=True)
        assert here.owner.copies == 0


async def test_a_request_is_answered_before_its_caller_gives_up() -> None:
    async with world(call_seconds=0.03) as here:
        assert not (await here.take(shard().ref)).durable
        await here.until_started()
        while (reply := await here.take(shard().ref)).pieces == 0:
            continue
        assert reply == CopyReply(durable=False, pieces=1)
        here.owner.may_end.set()
        while not (reply := await here.take(shard().ref)).durable:
            continue
        assert here.owner.copies == 1
        assert reply.durable


@pytest.mark.fault("All threads of a target of copies are busy")
async def test_a_copy_that_waits_for_a_thread_progresses_with_the_copies_before_it() -> None:
    """All threads copy. A sender would give up a copy that seems to make no progress for a minute."""
    async with world(call_seconds=0.03) as here:
        before = [shard(step).ref for step in range(10, 18)]
        running = [here.take(ref) for ref in before]
        for _ in before:
            await here.until_started()
        waiting = shard(20).ref
        while (first := (await here.take(waiting)).pieces) < len(before):
            continue
        assert here.owner.copies == len(before)
        here.owner.may_end.set()
        while not (reply := await here.take(waiting)).durable:
            assert reply.pieces != 0
        assert first == len(before)
        await asyncio.gather(*running)


@pytest.mark.fault("The owner's request for a copy is lost or cancelled while the copy runs")
async def test_a_caller_that_disconnects_does_not_end_the_copy() -> None:
    async with world() as here:
        request = here.take(shard().ref)
        await here.until_started()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        again = here.take(shard().ref)
        here.owner.may_end.set()
        assert await again == CopyReply(True, received_bytes=77)
        assert here.owner.copies == 1


async def test_after_a_failure_the_next_request_begins_again() -> None:
    async with world() as here:
        here.owner.may_end.set()
        here.owner.error = UnavailableError("the connection broke")
        with pytest.raises(RefusedError, match="the connection broke"):
            await here.take(shard().ref)
        here.owner.error = None
        assert await here.take(shard().ref) == CopyReply(True, received_bytes=77)
        assert here.owner.copies == 2


@pytest.mark.parametrize(
    ("error", "raised", "code"),
    [
        (UnavailableError("x"), RefusedError, Refusal.BUSY),
        (AccessDeniedError("x"), RefusedError, Refusal.BUSY),
        (CapacityError("x"), RefusedError, Refusal.NO_SPACE),
        (RefusedError(Refusal.NOT_MEMBER, "x"), RefusedError, Refusal.NOT_MEMBER),
        (NotFoundError("x"), NotFoundError, None),
        (CorruptionError("x"), CorruptionError, None),
    ],
)
async def test_the_owner_receives_the_reason_of_a_failure(
    error: HoldfastError, raised: type[HoldfastError], code: Refusal | None
) -> None:
    async with world() as here:
        here.owner.may_end.set()
        here.owner.error = error
        with pytest.raises(raised) as caught:
            await here.take(shard().ref)
        assert getattr(caught.value, "code", None) == code


@pytest.mark.fault("The round is sealed while a target copies")
async def test_a_copy_of_a_round_that_was_sealed_meanwhile_is_not_kept() -> None:
    async with world() as here:
        request = here.take(shard().ref)
        await here.until_started()
        here.round.state = here.round.state.sealed_for(RestartRound(ROUND + 1))
        here.owner.may_end.set()
        with pytest.raises(StaleRoundError):
            await request
        assert here.node.list_shards() == ()


@pytest.mark.fault("A step is pruned while a copy of it arrives")
@pytest.mark.parametrize("pruned_after_the_copy", [False, True])
async def test_a_copy_of_a_step_that_was_pruned_meanwhile_is_not_kept(
    pruned_after_the_copy: bool,
) -> None:
    """The step is pruned while bytes arrive, or when the copy has just been published."""
    async with world() as here:
        ref, loop = shard().ref, asyncio.get_running_loop()
        request = here.take(ref)
        await here.until_started()
        if pruned_after_the_copy:
            here.owner.published = lambda: loop.call_soon_threadsafe(
                here.copies.forget, frozenset({ref.step})
            )
        else:
            here.copies.forget(frozenset({ref.step, 99}))
        here.owner.may_end.set()
        with pytest.raises(NotFoundError, match="pruned"):
            await request
        assert here.node.list_shards() == ()
        assert (await here.take(shard(8).ref)).durable


@pytest.mark.fault("A target of copies learns earlier than their owner that a step was dropped")
async def test_a_step_that_was_dropped_is_not_copied() -> None:
    """Nothing would delete the copy in this round, which may last for months."""
    async with world() as here:
        here.owner.may_end.set()
        here.dropped = {7}
        ref = replace(shard(7).ref, round=ROUND)
        with pytest.raises(NotFoundError):
            await here.take(ref)
        assert here.owner.copies == 0
        assert (await here.take(replace(ref, round=RestartRound(ROUND - 1)))).durable


@pytest.mark.fault("A step is dropped while a target of copies looks for it on its disk")
async def test_a_step_that_is_dropped_before_its_copy_begins_is_not_copied() -> None:
    async with world() as here:
        looking, go_on, find = threading.Event(), threading.Event(), here.node.find

        def slow(ref: ShardRef) -> ShardRecord | None:
            looking.set()
            assert go_on.wait(HANG_SECONDS)
            return find(ref)

        here.node.find = slow  # type: ignore[method-assign]
        request = here.take(replace(shard(7).ref, round=ROUND))
        assert await asyncio.to_thread(looking.wait, HANG_SECONDS)
        here.dropped = {7}
        here.copies.forget(frozenset({Step(7)}))
        here.owner.may_end.set()
        go_on.set()
        with pytest.raises(NotFoundError):
            await request
        assert here.owner.copies == 0


async def test_a_shard_of_another_job_is_refused() -> None:
    async with world() as here:
        ref = replace(shard().ref, job_uid=JobUid("another-job"))
        with pytest.raises(RefusedError, match="another-job") as caught:
            await here.take(ref)
        assert caught.value.code is Refusal.NOT_ASSIGNED
        assert here.owner.copies == 0


async def test_closing_does_not_wait_for_copies(tmp_path: Path) -> None:
    async with world() as here:
        request = here.take(shard().ref)
        await here.until_started()
        await here.copies.close()
        with pytest.raises(asyncio.CancelledError):
            await request
