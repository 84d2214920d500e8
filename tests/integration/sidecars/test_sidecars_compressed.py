"""A gang with compressed uploads sends fewer bytes to the store, and restores every bit from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.shards.builders import weights
from tests.support.sidecar.gang import Gang, Gangs

from holdfast_core.ids import CheckpointId, RestartRound, Step, TierName
from holdfast_core.messages.schema import Policy
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration

Stored = Callable[[str], list[str]]
MIB = 1 << 20
PLAIN = Policy(interval_steps=1, peer_copies=0, keep_last=2, object_every_steps=2)
COMPRESSED = replace(PLAIN, object_compression="Zstd")


async def compressed_bytes(gang: Gang, worker: int, direction: str) -> int:
    """Return the bytes that went into the worker's compression ("input") or came out of it ("output")."""
    name = f"holdfast_compression_{direction}_bytes_total"
    return (await asyncio.to_thread(gang.counted, worker, name)).get("object", 0)


async def test_a_compressed_step_refers_to_a_plain_one_that_is_kept_while_it_is_needed(
    gangs: Gangs, store: dict[str, Any], tier: ObjectTier, stored: Stored
) -> None:
    """The first step is stored uncompressed. Later steps are compressed and send only what changed.

    Pruning keeps the objects that the newest step needs.
    """
    size = 20 * MIB
    async with gangs(2, **store) as gang:
        gang.slot_bytes = size + MIB
        frozen = {w: weights(size * 9 // 10, seed=50 + w) for w in range(2)}

        def states(step: int) -> dict[int, bytes]:
            trained = {w: weights(size // 10, seed=step + 100 * w) for w in range(2)}
            return {w: trained[w] + frozen[w] for w in range(2)}

        await gang.start(policy=PLAIN, copies=())
        points = {2: await gang.persist(2, states(2), "F32")}
        await gang.operator.round_all(
            gang.operator.message(0, version=2, copies=(), policy=COMPRESSED)
        )
        for step in (4, 6):
            points[step] = await gang.persist(step, states(step), "F32")
        for worker in range(2):
            before, after = [
                await compressed_bytes(gang, worker, end) for end in ("input", "output")
            ]
            assert 2 * size // 10 <= before <= 2 * size // 10 + MIB
            assert after < 0.88 * before
        assert len(stored(".shard")) == 2
        await gang.prune(points[2], points[4])
        newest = CheckpointId(Step(6), RestartRound(0))
        assert tier.list_manifests("team-a", gang.operator.job_uid) == (newest,)
        needed = stored("shards/s000000000002-")
        assert len([name for name in needed if not name.endswith(".layout")]) == 2
        assert stored("shards/s000000000004-") == []
        restored = await gang.restored_after_loss_of_all(points[6], COMPRESSED)
        assert restored == {w: (data, TierName.OBJECT) for w, data in states(6).items()}
