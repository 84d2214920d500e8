"""Real sidecars and a real MinIO: a bucket that was emptied, and the last upload of a job that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.servers.minio_server import MinioServer
from tests.support.sidecar.gang import Gangs
from tests.support.tiers.stores import s3_store

from holdfast_core.format.keys import manifest_key
from holdfast_core.ids import CheckpointId, Level, RestartRound, Step, TierName
from holdfast_core.messages.schema import CoordinatorState, GangRequest, Ok, Policy
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.upload import Document

pytestmark = pytest.mark.integration

SELDOM = Policy(interval_steps=1, peer_copies=1, object_every_steps=1000)


def persisted(step: int) -> Callable[[Any], bool]:
    return lambda s: s.last_persisted is not None and s.last_persisted.step == step


def missing(state: CoordinatorState) -> bool:
    reasons = {f.reason for f in state.failures if f.tier is TierName.OBJECT}
    return "CheckpointMissing" in reasons and bool(state.cannot_restore)


@pytest.mark.fault("The bucket is emptied, and all pods are lost")
async def test_an_emptied_bucket_is_named_and_the_restore_goes_on_when_it_is_filled_again(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer
) -> None:
    objects = s3_store(store["store"], minio.credentials)
    async with gangs(2, **store) as gang:
        await gang.start(policy=SELDOM)
        saved = await gang.commit(1, Level.PERSISTED)
        point = (await gang.operator.state_until(0, persisted(1), "step 1")).last_persisted
        for worker in (0, 1):
            gang.lose(worker)
        keys = [o.key for o in objects.list(store["store"].prefix + "/").objects]
        had = {key: objects.get(key) for key in keys}
        objects.delete(keys)
        for worker in (0, 1):
            await gang.launch(worker, birth_round=1)
        fields = {"restore": point, "last_persisted": point, "policy": SELDOM}
        message = gang.operator.message(1, copies=gang.copies, **fields)  # type: ignore[arg-type]
        await gang.operator.round_all(message)
        state = await gang.operator.state_until(0, missing, "the checkpoint is missing")
        assert not state.restore_may_succeed
        [failure] = [f for f in state.failures if f.reason == "CheckpointMissing"]
        for text in (failure.message, state.cannot_restore.partition("; ")[0]):
            assert store["store"].bucket in text
            assert manifest_key(CheckpointId(Step(1), RestartRound(0))) in text
        for key, data in had.items():
            objects.write(key, Document(data))
        await gang.begin(1, version=2, **fields)
        for worker in (0, 1):
            _, data, filled = await gang.ranks[worker].restore()
            assert (data, filled.tier) == (saved[worker], TierName.OBJECT)
        await gang.operator.state_until(0, lambda s: not s.cannot_restore, "it is restored")
    objects.close()


async def test_the_end_of_a_job_persists_the_newest_step_of_its_round(
    gangs: Gangs, store: dict[str, Any], tier: ObjectTier
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=SELDOM)
        await gang.commit(1, Level.PERSISTED)
        await gang.commit(2, Level.REPLICATED)
        await gang.operator.call(0, "/v1/end", GangRequest(RestartRound(0), "end"), Ok)
        await gang.operator.state_until(0, persisted(2), "step 2 persisted")
        assert CheckpointId(Step(2), RestartRound(0)) in tier.list_manifests(
            "team-a", gang.operator.job_uid
        )


@pytest.mark.fault("A job fails while only its pods have its newest committed step")
async def test_the_end_of_a_job_persists_the_restore_point_of_a_round_that_never_trained(
    gangs: Gangs, store: dict[str, Any], tier: ObjectTier
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=SELDOM)
        await gang.commit(1, Level.PERSISTED)
        await gang.commit(2, Level.REPLICATED)
        first = (await gang.operator.state_until(0, persisted(1), "step 1")).last_persisted
        point = await gang.point(2)
        for worker in (0, 1):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=point, last_persisted=first, policy=SELDOM)
        await gang.operator.call(0, "/v1/end", GangRequest(RestartRound(1), "end"), Ok)
        state = await gang.operator.state_until(0, persisted(2), "the restore point is persisted")
        assert state.last_persisted.round == 0
        assert point.own_checkpoint in tier.list_manifests("team-a", gang.operator.job_uid)
