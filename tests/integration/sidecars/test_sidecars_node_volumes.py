"""Sidecars whose node tiers have two volumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.sidecar.gang import Gang, Gangs

from holdfast_core.ids import Level, TierName
from holdfast_core.messages.schema import Policy

pytestmark = pytest.mark.integration

POLICY = Policy(interval_steps=1, peer_copies=1)


def shards(gang: Gang, worker: int) -> list[list[int]]:
    """Return the ranks whose shards each volume of the worker has."""
    first = gang.sidecars[worker].node
    volumes = (first, Path(f"{first}-1"))
    return [sorted({int(p.name[4:10]) for p in v.rglob("rank*.shard")}) for v in volumes]


async def test_shards_on_the_second_volume_are_listed_and_restored(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        gang.more_node_bytes = (1 << 30,)
        await gang.start(policy=POLICY)
        await gang.commit(1, Level.REPLICATED)
        saved = await gang.commit(2, Level.REPLICATED)
        point = await gang.point(2)
        assert [shards(gang, worker) for worker in range(2)] == [[[0], [1]]] * 2

        # A sidecar that restarts finds the shards of both volumes.
        gang.sidecars[0].kill()
        gang.launchers.pop(0).close()
        await gang.relaunch(0)
        listed = (await gang.operator.inventory(0)).shards
        assert {shard.rank for shard in listed if shard.step == 2} == {0, 1}

        # A new pod gets its shard from the second volume of its peer.
        gang.lose(1)
        await gang.operator.seal(0, 1)
        await gang.launch(1, birth_round=1)
        await gang.begin(1, restore=point, policy=POLICY)
        _, data, filled = await gang.ranks[1].restore()
        assert data == saved[1]
        assert filled.tier is TierName.PEER
        _, data, _ = await gang.ranks[0].restore()
        assert data == saved[0]


async def test_a_second_volume_without_room_fails_the_saves_of_its_ranks(gangs: Gangs) -> None:
    async with gangs(1) as gang:
        gang.more_node_bytes = (1 << 16,)
        await gang.start(policy=Policy(interval_steps=1, peer_copies=0))
        await gang.commit(1, Level.LOCAL)
        assert shards(gang, 0) == [[0], []], "rank 0 never uses the second volume"
