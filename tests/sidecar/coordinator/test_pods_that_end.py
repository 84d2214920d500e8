"""Whether pods that end wait until the newest step is in the object store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.sidecar.coordinators import CoordinatorWorld
from tests.support.sidecar.waiting import until
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.ids import Level, RestartRound, Worker
from holdfast_core.messages.schema import Ok, Policy, StoredAs, WorkerReport, WorkerReports
from holdfast_core.store.tier import ObjectTier

COPIES = Policy(interval_steps=1, peer_copies=1)
ELASTIC = Policy(interval_steps=1, peer_copies=1, shrinks=True)
NO_COPIES = Policy(interval_steps=1, peer_copies=0)


class Members:
    """Members that accept everything."""

    async def call(self, *_: Any) -> Ok:
        return Ok(RestartRound(0))


def report(worker: int, *, ends: bool = False) -> WorkerReports:
    round_ = RestartRound(0)
    return WorkerReports(round_, (WorkerReport(round_, Worker(worker), ends=ends),))


@pytest.mark.parametrize(
    ("policy", "ending", "has_store", "waits"),
    [
        pytest.param(COPIES, (), True, False, id="no pod ends"),
        pytest.param(COPIES, (0,), True, False, id="the pod with its copies stays"),
        pytest.param(COPIES, (0, 1), True, True, id="the pod with its copies ends, too"),
        pytest.param(COPIES, (0, 1), False, False, id="there is no store"),
        pytest.param(ELASTIC, (), True, False, id="elastic, and no pod ends"),
        pytest.param(ELASTIC, (0,), True, True, id="fewer workers cannot restore from copies"),
        pytest.param(ELASTIC, (0,), False, False, id="elastic, and there is no store"),
        pytest.param(NO_COPIES, (), True, False, id="no copies, and no pod ends"),
        pytest.param(NO_COPIES, (0,), True, True, id="no pod has copies"),
    ],
)
async def test_pods_that_end_wait_for_the_store_if_nothing_else_stays(
    tmp_path: Path, policy: Policy, ending: tuple[int, ...], has_store: bool, waits: bool
) -> None:
    store = ObjectTier(MemoryObjectStore()) if has_store else None
    async with CoordinatorWorld(tmp_path, None, policy, store) as world:
        for worker in (0, 1):
            world.coordinator.report(report(worker))
        replies = [world.coordinator.report(report(worker, ends=True)) for worker in ending]
        for reply in (*replies[-1:], world.coordinator.report(report(0, ends=0 in ending))):
            assert reply.waits_for_store is waits


async def test_pods_that_end_do_not_wait_for_a_worker_that_is_silent(tmp_path: Path) -> None:
    """Without its shards the step cannot be persisted, and the grace period may be an hour."""
    store = ObjectTier(MemoryObjectStore())
    async with CoordinatorWorld(tmp_path, None, NO_COPIES, store) as world:
        assert not world.coordinator.report(report(0, ends=True)).waits_for_store
        world.coordinator.report(report(1))
        assert world.coordinator.report(report(0, ends=True)).waits_for_store
        world.clock.advance(21.0)
        assert not world.coordinator.report(report(0, ends=True)).waits_for_store


@pytest.mark.fault("A quota of the object store is reached while all pods of a gang are evicted")
async def test_pods_that_end_do_not_wait_for_room_in_the_store(tmp_path: Path) -> None:
    """Nothing is uploaded until a person acts, and the grace period may be an hour."""
    store = ObjectTier(MemoryObjectStore())
    async with CoordinatorWorld(tmp_path, None, NO_COPIES, store, hold_uploads=True) as world:
        for worker in (0, 1):
            reply = world.coordinator.report(report(worker, ends=True))
        assert not reply.waits_for_store


@pytest.mark.fault("The operator is away while the last pod of a gang saves and ends")
async def test_a_pod_ends_when_the_operator_knows_of_the_newest_step_in_the_store(
    tmp_path: Path,
) -> None:
    """The report that the pod leaves may come before those of its last step. With all pods gone, a step that
    the operator does not know of is lost."""
    store = ObjectTier(MemoryObjectStore())
    policy = replace(NO_COPIES, object_every_steps=1)
    async with CoordinatorWorld(tmp_path, Members(), policy, store) as world:
        coordinator = world.coordinator
        coordinator.start()

        async def persist(step: int) -> None:
            shards = [replace(world.shard(r, step), committed=True) for r in (0, 1)]
            for rank, shard in enumerate(shards):
                world.tell(rank, shards=(shard,))
            await until(lambda: coordinator.levels()[Level.LOCAL] == step, f"step {step} is local")
            for rank, shard in enumerate(shards):
                world.tell(rank, shards=(replace(shard, uploaded=StoredAs()),))
            await until(lambda: coordinator.levels()[Level.PERSISTED] == step, f"step {step}")

        async def told() -> None:
            state = await coordinator.state(0, 0, 0, acknowledges=True)
            await coordinator.state(state.version, 0, 0, acknowledges=True)

        await persist(1)
        world.tell(0, ends=True, leaves=True)
        for _ in range(50):
            await asyncio.sleep(0)
        await told()
        assert coordinator.may_end
        await persist(2)
        assert not coordinator.may_end
        for _ in range(50):
            await asyncio.sleep(0)
        await told()
        assert coordinator.may_end
