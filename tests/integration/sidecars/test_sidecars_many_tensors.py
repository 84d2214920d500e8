"""Real sidecars save and restore ranks of 100,000 tensors, whose layouts have more than 10 MB each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.shards.placements import objects_of
from tests.support.sidecar.gang import Gang, Gangs

from holdfast_core.contract import StoreConfig
from holdfast_core.format.payload import plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import Rank, TierName
from holdfast_core.messages.schema import Policy

pytestmark = pytest.mark.integration

EXPERTS = 25_000
PARTS = ("weight", "exp_avg", "exp_avg_sq", "step")
OBJECTS_BYTES = 64


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank saves."""

    layout: bytes
    payload: bytes


def part_of(rank: int, ranks: int) -> Part:
    """Return the half of a model of unfused experts that a rank has: every tensor is cut by rows."""
    names = [f"model.experts.{expert}.{part}" for expert in range(EXPERTS) for part in PARTS]
    plan = plan_payload(((name, "F32", (1, 8)) for name in names), OBJECTS_BYTES)
    layout = RankLayout(
        Rank(rank),
        {
            item.fqn: TensorSlice("F32", (ranks, 8), (rank, 0), (1, 8), item.byte_range)
            for item in plan.tensors
        },
        {"model": plan.objects},
        plan.total_bytes,
    )
    tensor_bytes = plan.objects.start - len(plan.header)
    data = (
        plan.header + random.Random(rank).randbytes(tensor_bytes) + objects_of(rank, OBJECTS_BYTES)
    )
    return Part(layout.to_bytes(), data)


async def restored(gang: Gang) -> dict[int, tuple[bytes | None, TierName | None]]:
    found = {}
    for worker, rank in gang.ranks.items():
        _, data, filled = await rank.restore()
        found[worker] = (data, None if filled is None else filled.tier)
    return found


async def test_ranks_of_100_000_tensors_restore_from_every_tier(
    gangs: Gangs, tmp_path: Path
) -> None:
    policy = Policy(interval_steps=1, peer_copies=1, object_every_steps=1)
    store = StoreConfig(f"file://{tmp_path}/objects", False, "", "", "")
    parts = [part_of(rank, 2) for rank in range(2)]
    async with gangs(2, store=store) as gang:
        gang.slot_bytes = 32 << 20
        await gang.start(policy=policy)
        for rank, part in enumerate(parts):
            await gang.ranks[rank].save(1, part.payload, part.layout)
            gang.ranks[rank].progress(1)
        point = await gang.persisted(1)
        await gang.point(1)

        for worker in range(2):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=point, policy=policy)
        expected = {rank: (part.payload, TierName.MEMORY) for rank, part in enumerate(parts)}
        assert await restored(gang) == expected

        gang.lose(1)
        await gang.operator.seal(0, 2)
        await gang.launch(1, birth_round=2)
        # Worker 0 serves its copy from its ROUND on. Worker 1 would otherwise read from the store.
        message = gang.operator.message(2, restore=point, policy=policy, copies=gang.copies)
        await gang.operator.round(0, message)
        await gang.begin(2, version=2, restore=point, policy=policy)
        expected[1] = (parts[1].payload, TierName.PEER)
        assert await restored(gang) == expected

        for worker in range(2):
            gang.lose(worker)
        for worker in range(2):
            await gang.launch(worker, birth_round=3)
        await gang.begin(3, restore=point, policy=policy, copies=())
        assert await restored(gang) == {
            rank: (part.payload, TierName.OBJECT) for rank, part in enumerate(parts)
        }
