"""Real sidecars and a real MinIO: while a quota holds uploads, commits go on, and the newest step follows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.support.servers.minio_server import MinioServer
from tests.support.sidecar import DEADLINE_SECONDS
from tests.support.sidecar.gang import Gang, Gangs
from tests.support.tiers.stores import s3_tier

from holdfast_core.ids import Level
from holdfast_core.messages.schema import CoordinatorState, Policy

pytestmark = pytest.mark.integration

EACH = Policy(interval_steps=1, peer_copies=1, keep_last=2, object_every_steps=1)


async def hold(gang: Gang, *, version: int, held: bool) -> None:
    """Send ROUND again, as the operator does when a quota is reached or has room again."""
    message = gang.operator.message(0, version=version, copies=gang.copies, policy=EACH)
    await gang.operator.round_all(replace(message, hold_uploads=held))


def persisted(state: CoordinatorState) -> int | None:
    return None if state.last_persisted is None else state.last_persisted.step


@pytest.mark.fault("A quota of the object store is reached during training")
async def test_held_uploads_block_no_commit_and_go_on_with_the_newest_step(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=EACH)
        await gang.commit(1, Level.PERSISTED)
        await gang.operator.state_until(0, lambda s: persisted(s) == 1, "step 1 persisted")
        await hold(gang, version=2, held=True)
        for step in range(2, 8):
            await gang.commit(step, Level.REPLICATED)
        state = await gang.operator.state_until(
            0, lambda s: s.last_replicated is not None and s.last_replicated.step == 7, "step 7"
        )
        assert persisted(state) == 1
        assert not state.failures, "a quota is no failure"
        tier = s3_tier(store["store"], minio.credentials)
        assert [c.step for c in tier.list_manifests("team-a", gang.operator.job_uid)] == [1]
        await hold(gang, version=3, held=False)
        await gang.operator.state_until(0, lambda s: persisted(s) == 7, "step 7 persisted")
        assert [c.step for c in tier.list_manifests("team-a", gang.operator.job_uid)] == [1, 7]
        tier.close()


@pytest.mark.fault("All ranks return while a quota of the object store is reached")
async def test_a_gang_that_has_finished_keeps_its_last_step_until_there_is_room(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=EACH)
        await hold(gang, version=2, held=True)
        await gang.commit(3, Level.REPLICATED)
        for rank in gang.ranks.values():
            rank.close()
        waiting = [asyncio.create_task(launcher.finish()) for launcher in gang.launchers.values()]
        await asyncio.sleep(2.0)
        state = await gang.operator.state(0, since=0)
        assert not state.finished and persisted(state) is None
        await hold(gang, version=3, held=False)
        state = await gang.operator.state_until(0, lambda s: s.finished, "finished")
        assert persisted(state) == 3
        await gang.operator.state(0, since=state.version)
        await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_SECONDS)
