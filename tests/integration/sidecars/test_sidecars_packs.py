"""Uploads to the store send each chunk once (A7).

A chunk is not sent again for another rank that also has it, or while it is unchanged. The omitted chunks
are restored bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.servers.hostile_s3 import Answer, HostileProxy, Seen
from tests.support.servers.minio_server import MinioServer
from tests.support.sidecar.gang import Gangs, one_tensor

from holdfast_core.ids import CheckpointId, Level, RestartRound, Step, TierName
from holdfast_core.messages.schema import Policy
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration

Stored = Callable[[str], list[str]]
MIB = 1 << 20
EVERY_TWO = Policy(interval_steps=1, peer_copies=0, keep_last=2, object_every_steps=2)
STEP_2 = CheckpointId(Step(2), RestartRound(0))


async def test_replicas_upload_their_share_and_are_restored_from_the_store(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    """Each rank sends at most 1/N + 2 % of its state, although one replica differs in some places."""
    workers, size = 4, 32 * MIB
    async with gangs(workers, **store) as gang:
        gang.slot_bytes = size + MIB
        await gang.start(policy=EVERY_TWO, copies=())
        model = random.Random(5).randbytes(size)
        states = {w: model + f"data of rank {w}".encode().ljust(500) for w in range(workers)}
        states[2] = model[: 5 * MIB] + b"diverged" + model[5 * MIB + 8 :] + states[2][size:]
        point = await gang.persist(2, states)
        for worker in range(workers):
            sent = await gang.sent_bytes(worker, TierName.OBJECT)
            assert 0 < sent <= (1 / workers + 0.02) * len(states[worker])
        restored = await gang.restored_after_loss_of_all(point, EVERY_TWO)
        assert restored == {w: (data, TierName.OBJECT) for w, data in states.items()}


async def test_a_step_is_uploaded_whole_when_its_base_is_deleted_meanwhile(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer, tier: ObjectTier, stored: Stored
) -> None:
    """The base is deleted when the coordinator puts the references.

    The first attempt leaves only its markers.
    """
    size = 8 * MIB
    with HostileProxy(minio.endpoint) as proxy:
        store["store"] = minio.config(store["store"].prefix, endpoint=proxy.endpoint)
        async with gangs(2, **store) as gang:
            gang.slot_bytes = size + MIB
            await gang.start(policy=EVERY_TWO, copies=())
            states = {w: random.Random(w).randbytes(size) for w in range(2)}
            await gang.persist(2, states)

            def delete_base(seen: Seen) -> bool:
                if seen.method == "PUT" and "/references/" in seen.path:
                    tier.delete_checkpoint("team-a", gang.operator.job_uid, STEP_2)
                return False

            proxy.add(delete_base, Answer(500))
            point = await gang.persist(4, states)
            markers = stored("references/")
            assert len(markers) == 2
            assert all("s000000000004-" in marker for marker in markers), (
                "they protect too much at worst, and go with the step"
            )
            assert len(stored(".shard")) == 2
            assert stored("shards/s000000000002-") == []
            restored = await gang.restored_after_loss_of_all(point, EVERY_TWO)
            assert restored == {w: (data, TierName.OBJECT) for w, data in states.items()}


async def test_an_upload_does_not_wait_for_a_member_that_does_not_answer(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    """Worker 1 restarts after the commit.

    A member that cannot read its tables uploads all of its own bytes, and the checkpoint is complete.
    """
    size = 8 * MIB
    async with gangs(2, **store) as gang:
        gang.slot_bytes = size + MIB
        await gang.start(policy=EVERY_TWO, copies=())
        model = random.Random(1).randbytes(size)
        for worker, rank in gang.ranks.items():
            await rank.save(2, model, one_tensor(worker, size))
        await gang.ranks[1].reached(2, Level.LOCAL)
        gang.sidecars[1].kill()
        await gang.relaunch(1)
        message = gang.operator.message(0, version=2, copies=(), policy=EVERY_TWO)
        await gang.operator.round_all(message)
        point = await gang.persisted(2)
        restored = await gang.restored_after_loss_of_all(point, EVERY_TWO)
        assert restored == {w: (model, TierName.OBJECT) for w in range(2)}
