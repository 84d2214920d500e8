"""Towards the store: what ranks hold in common goes up once, what is unchanged not again (A7); and
whatever was left out comes back bit by bit.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.servers.hostile_s3 import Answer, HostileProxy, Seen
from tests.support.servers.minio_server import MinioServer

from holdfast_core.format.dtypes import element_bytes
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import ByteRange, CheckpointId, Level, Rank, RestartRound, Step, TierName
from holdfast_core.messages.schema import Policy, Prune, PruneReply, RestorePoint
from holdfast_core.store.tier import S3ObjectTier

pytestmark = pytest.mark.integration

Gangs = Callable[..., Any]
MIB = 1 << 20
EVERY_TWO = Policy(interval_steps=1, peer_copies=0, keep_last=2, object_every_steps=2)


@pytest.fixture
def tier(minio: MinioServer, store: dict[str, Any]) -> Iterator[S3ObjectTier]:
    tier = S3ObjectTier(store["store"], minio.credentials)
    yield tier
    tier.close()


def replica(rank: int, size: int, dtype: str = "U8") -> bytes:
    """Every rank's layout: the whole of one tensor."""
    count = size // element_bytes(dtype, "w")
    whole = TensorSlice(dtype, (count,), (0,), (count,), ByteRange(0, size))
    return RankLayout(Rank(rank), {"w": whole}, {}, size).to_bytes()


def sent_bytes(gang: Any, worker: int) -> int:
    """To the store, as this worker's sidecar counts them."""
    port = json.loads((gang.sidecars[worker].node / "ports.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    found = re.search(r'^holdfast_sent_bytes_total{tier="object"} (\S+)$', text, re.MULTILINE)
    return int(float(found[1])) if found else 0


async def persist(
    gang: Any, step: int, states: dict[int, bytes], dtype: str = "U8"
) -> RestorePoint:
    """Every rank saves; returns the persisted checkpoint."""
    for worker, data in states.items():
        await gang.ranks[worker].save(step, data, replica(worker, len(data), dtype))
        gang.ranks[worker].progress(step)
    for rank in gang.ranks.values():
        await rank.reached(step, Level.PERSISTED)

    def there(state: Any) -> bool:
        return state.last_persisted is not None and state.last_persisted.step == step

    state = await gang.operator.state_until(0, there, f"step {step} persisted")
    point: RestorePoint = state.last_persisted
    return point


async def prune_all_but_6(gang: Any, points: dict[int, RestorePoint], tier: S3ObjectTier) -> None:
    """The checkpoints of steps 2 and 4."""
    message = Prune(RestartRound(0), (points[2], points[4]))
    reply = await gang.operator.call(0, "/v1/prune", message, PruneReply)
    assert reply.deleted == (points[2], points[4])
    assert tier.list_manifests("team-a", gang.operator.job_uid) == (checkpoint(6),)


async def lose_all_and_restore(gang: Any, point: RestorePoint, states: dict[int, bytes]) -> None:
    for worker in states:
        gang.lose(worker)
    for worker in states:
        await gang.launch(worker, birth_round=1)
    await gang.begin(1, restore=point, policy=EVERY_TWO, copies=())
    for worker, expected in states.items():
        _, data, filled = await gang.ranks[worker].restore()
        assert filled.tier is TierName.OBJECT
        assert data == expected


def checkpoint(step: int) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(0))


def names(minio: MinioServer, store: dict[str, Any], part: str) -> list[str]:
    listed = minio.admin().list_objects(minio.bucket, prefix=store["store"].prefix, recursive=True)
    return [str(item.object_name) for item in listed if part in str(item.object_name)]


async def test_replicas_send_their_share_and_come_back_from_the_store(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    """At most 1/N + 2 % of the state each, although one replica has diverged in some places."""
    workers, size = 4, 32 * MIB
    async with gangs(workers, **store) as gang:
        gang.slot_bytes = size + MIB
        await gang.start(policy=EVERY_TWO, copies=())
        model = random.Random(5).randbytes(size)
        states = {w: model + f"data of rank {w}".encode().ljust(500) for w in range(workers)}
        states[2] = model[: 5 * MIB] + b"diverged" + model[5 * MIB + 8 :] + states[2][size:]
        point = await persist(gang, 2, states)
        for worker in range(workers):
            sent = await asyncio.to_thread(sent_bytes, gang, worker)
            assert 0 < sent <= (1 / workers + 0.02) * len(states[worker])
        await lose_all_and_restore(gang, point, states)


async def test_a_frozen_base_is_sent_once_and_kept_while_it_is_needed(
    gangs: Gangs, store: dict[str, Any], tier: S3ObjectTier, minio: MinioServer
) -> None:
    """Later saves send the trainable share and 1 %; of what the operator prunes, the objects that the
    newest checkpoint needs stay; and that one comes back."""
    size = 20 * MIB
    async with gangs(2, **store) as gang:
        gang.slot_bytes = size + MIB
        await gang.start(policy=EVERY_TWO, copies=())
        frozen = {w: random.Random(w).randbytes(size * 9 // 10) for w in range(2)}

        def states(step: int) -> dict[int, bytes]:
            trained = {w: random.Random(step + 100 * w).randbytes(size // 10) for w in range(2)}
            return {w: trained[w] + frozen[w] for w in range(2)}

        points, before = {}, [0, 0]
        for step, share in ((2, 1.01), (4, 0.11), (6, 0.11)):
            points[step] = await persist(gang, step, states(step))
            for worker in range(2):
                total = await asyncio.to_thread(sent_bytes, gang, worker)
                assert 0 < total - before[worker] <= share * size
                before[worker] = total
        await prune_all_but_6(gang, points, tier)
        assert len(names(minio, store, "shards/s000000000002/")) == 2
        assert names(minio, store, "shards/s000000000004/") == []
        await lose_all_and_restore(gang, points[6], states(6))


def test_a_base_that_is_deleted_meanwhile(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer, tier: S3ObjectTier
) -> None:
    """When the coordinator puts the references, the base goes. The step is persisted all the same,
    whole, and of the first attempt only its references stay."""

    async def scenario(proxy: HostileProxy) -> None:
        size = 8 * MIB
        store["store"] = minio.config(store["store"].prefix, endpoint=proxy.endpoint)
        async with gangs(2, **store) as gang:
            gang.slot_bytes = size + MIB
            await gang.start(policy=EVERY_TWO, copies=())
            states = {w: random.Random(w).randbytes(size) for w in range(2)}
            await persist(gang, 2, states)

            def take_base(seen: Seen) -> bool:
                if seen.method == "PUT" and "/references/" in seen.path:
                    tier.delete_checkpoint("team-a", gang.operator.job_uid, checkpoint(2))
                return False

            proxy.add(take_base, Answer(500))
            point = await persist(gang, 4, states)
            (stale,) = names(minio, store, "references/")
            assert "/s000000000004/" in stale, "keeps nothing too short, and goes with the step"
            assert len(names(minio, store, ".shard")) == 2
            minio_names = names(minio, store, "shards/s000000000002/")
            assert minio_names == []
            await lose_all_and_restore(gang, point, states)

    with HostileProxy(minio.endpoint) as proxy:
        asyncio.run(scenario(proxy))


async def test_a_member_that_does_not_answer_is_not_waited_for(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer
) -> None:
    """Worker 1 restarts after the commit: whoever could not ask it uploads its own bytes, and the
    checkpoint is whole."""
    size = 8 * MIB
    async with gangs(2, **store) as gang:
        gang.slot_bytes = size + MIB
        await gang.start(policy=EVERY_TWO, copies=())
        model = random.Random(1).randbytes(size)
        states = {w: model for w in range(2)}
        for worker, data in states.items():
            await gang.ranks[worker].save(2, data, replica(worker, size))
        await gang.ranks[1].reached(2, Level.LOCAL)
        gang.sidecars[1].kill()
        await gang.relaunch(1)
        held = gang.operator.message(0, version=2, copies=(), policy=EVERY_TWO)
        await gang.operator.round_all(held)

        def there(state: Any) -> bool:
            return state.last_persisted is not None and state.last_persisted.step == 2

        state = await gang.operator.state_until(0, there, "step 2 persisted")
        await lose_all_and_restore(gang, state.last_persisted, states)
