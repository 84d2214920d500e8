"""Nodes without room: a full node does not fill the others, and older steps are deleted before saves fail."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.sidecar import until
from tests.support.sidecar.gang import Gangs
from tests.support.sidecar.processes import files_below

from holdfast_core.ids import Level
from holdfast_core.messages.schema import Policy, RestorePoint

pytestmark = pytest.mark.integration

SHARD = 120_000
"""Bytes, slightly more than the file of one shard of these gangs takes."""


def capacity(shards: int) -> int:
    """Return the capacity of a node tier that accepts exactly this number of shards (it fills 85 % of it)."""
    return int(shards * SHARD / 0.85)


def shards_on(gang: Any, worker: int) -> list[str]:
    node = gang.sidecars[worker].node
    return sorted(p.name for p in files_below(node, "*.shard") if "quarantine" not in p.parts)


async def save_fails(gang: Any, worker: int, step: int) -> None:
    rank = gang.ranks[worker]
    await until(
        lambda: any(m.step == step for m in rank.failures),
        f"rank {worker} is notified that step {step} failed",
    )


@pytest.mark.fault("One node of a gang has a full volume")
@pytest.mark.parametrize("slots", [2, 3], ids=["written at once", "may wait in memory"])
async def test_one_full_node_does_not_fill_the_others(gangs: Gangs, slots: int) -> None:
    """Worker 1 has room for one step. Worker 0 has room for all of them, but keeps few."""
    async with gangs(2) as gang:
        gang.slots = slots
        gang.small_nodes[1] = capacity(2)
        await gang.start(policy=Policy(interval_steps=1, slots=slots))
        await gang.commit(1, Level.REPLICATED)
        for step in range(2, 6):
            await gang.save(step)
            await save_fails(gang, 1, step)
        await until(lambda: len(shards_on(gang, 0)) <= 4, "steps that cannot be committed go")
        # A write that is tried again is no failure, until it has failed again.
        state = await gang.operator.state_until(
            0,
            lambda s: [(f.reason, f.worker) for f in s.failures[:1]] == [("NodeVolumeFull", 1)],
            "the failure of worker 1",
        )
        assert state.last_replicated.step == 1, "the newest committed step stays"
        assert any("rank000001" in name for name in shards_on(gang, 0)), "with its copies"


@pytest.mark.fault("A volume has room for keepLast steps and not for one more")
@pytest.mark.parametrize("workers", [1, 2])
async def test_room_for_keep_last_and_not_for_one_more(gangs: Gangs, workers: int) -> None:
    """Every save is committed, because the oldest step is deleted first."""
    async with gangs(workers) as gang:
        gang.node_capacity_bytes = capacity(3 * workers)
        level = Level.LOCAL if workers == 1 else Level.REPLICATED
        policy = Policy(interval_steps=1, keep_last=3, peer_copies=workers - 1)
        await gang.start(policy=policy)
        for step in range(1, 7):
            await gang.commit(step, level)
        for rank in gang.ranks.values():
            assert rank.failures == []


@pytest.mark.fault("A sidecar restarts on a volume that is full with the restore point")
async def test_room_for_two_steps_after_a_restart(gangs: Gangs) -> None:
    """The volume is full with the restore point and an older step.

    The older step is deleted first and the restore point later, but never the newest committed step.
    """
    async with gangs(1) as gang:
        gang.node_capacity_bytes = capacity(2)
        policy = Policy(interval_steps=1, keep_last=2, peer_copies=0)
        await gang.start(policy=policy)
        for step in (1, 2):
            saved = await gang.commit(step, Level.LOCAL)
        await gang.operator.seal(0, 1)
        point = await gang_point(gang)
        gang.launchers.pop(0).close()
        await gang.begin(1, restore=point, policy=policy)
        assert await gang.restored() == saved
        for step in range(3, 7):
            await gang.commit(step, Level.LOCAL)


async def gang_point(gang: Any) -> RestorePoint:
    inventory = await gang.operator.inventory(0)
    digest, newest = list(inventory.manifests.items())[-1]
    return RestorePoint(newest.step, newest.round, digest)
