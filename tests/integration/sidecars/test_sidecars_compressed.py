"""A gang whose uploads are compressed: fewer bytes go to the store, and every bit comes back from it."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.sidecars.test_sidecars_packs import (
    EVERY_TWO,
    Gangs,
    lose_all_and_restore,
    names,
    persist,
    prune_all_but_6,
)
from tests.support.servers.minio_server import MinioServer
from tests.support.shards.builders import weights

from holdfast_core.store.tier import S3ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20
COMPRESSED = replace(EVERY_TWO, object_compression="Zstd")


@pytest.fixture
def tier(minio: MinioServer, store: dict[str, Any]) -> Iterator[S3ObjectTier]:
    tier = S3ObjectTier(store["store"], minio.credentials)
    yield tier
    tier.close()


def counted(gang: Any, worker: int, name: str) -> int:
    port = json.loads((gang.sidecars[worker].node / "ports.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    found = re.search(rf'^{name}_total{{tier="object"}} (\S+)$', text, re.MULTILINE)
    return int(float(found[1])) if found else 0


async def test_replicas_compress_their_share(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer
) -> None:
    """Each its half of what is common, and nobody what another stores."""
    size = 16 * MIB
    async with gangs(2, **store) as gang:
        gang.slot_bytes = size + MIB
        await gang.start(policy=COMPRESSED, copies=())
        model = weights(size)
        states = {w: model + f"data of rank {w}".encode().ljust(500) for w in range(2)}
        point = await persist(gang, 2, states, "F32")
        for worker in range(2):
            before, after, sent = [
                await asyncio.to_thread(counted, gang, worker, f"holdfast_{what}_bytes")
                for what in ("compression_input", "compression_output", "sent")
            ]
            assert size / 2 <= before <= size / 2 + MIB
            assert after < 0.88 * before
            assert after < sent < after + 20_000, "and the index"
        assert len(names(minio, store, ".pack")) == 2
        await lose_all_and_restore(gang, point, states)


async def test_what_is_unchanged_is_not_sent_again_and_kept_while_it_is_needed(
    gangs: Gangs, store: dict[str, Any], tier: S3ObjectTier, minio: MinioServer
) -> None:
    """The first step is stored as it is, the others compressed: references reach from one to the
    other, and pruning keeps what the newest needs."""
    size = 20 * MIB
    async with gangs(2, **store) as gang:
        gang.slot_bytes = size + MIB
        frozen = {w: weights(size * 9 // 10, seed=50 + w) for w in range(2)}

        def states(step: int) -> dict[int, bytes]:
            trained = {w: weights(size // 10, seed=step + 100 * w) for w in range(2)}
            return {w: trained[w] + frozen[w] for w in range(2)}

        await gang.start(policy=EVERY_TWO, copies=())
        points = {2: await persist(gang, 2, states(2), "F32")}
        await gang.operator.round_all(
            gang.operator.message(0, version=2, copies=(), policy=COMPRESSED)
        )
        for step in (4, 6):
            points[step] = await persist(gang, step, states(step), "F32")
        for worker in range(2):
            before = await asyncio.to_thread(
                counted, gang, worker, "holdfast_compression_input_bytes"
            )
            assert 2 * size // 10 <= before <= 2 * size // 10 + MIB
        assert len(names(minio, store, ".shard")) == 2
        await prune_all_but_6(gang, points, tier)
        assert len(names(minio, store, "shards/s000000000002/")) == 2
        assert names(minio, store, "shards/s000000000004/") == []
        await lose_all_and_restore(gang, points[6], states(6))
