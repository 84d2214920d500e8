"""Whether pods that end wait until the newest step is in the object store."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.sidecar.coordinators import CoordinatorWorld
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import Policy, WorkerReport, WorkerReports
from holdfast_core.store.tier import ObjectTier

COPIES = Policy(interval_steps=1, peer_copies=1)
ELASTIC = Policy(interval_steps=1, peer_copies=1, shrinks=True)
NO_COPIES = Policy(interval_steps=1, peer_copies=0)


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
