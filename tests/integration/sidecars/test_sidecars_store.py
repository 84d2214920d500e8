"""Real sidecars and a real MinIO: checkpoints are persisted and restored, and survive an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.servers.minio_server import MinioServer
from tests.support.sidecar import DEADLINE_SECONDS, FakeOperator, until
from tests.support.sidecar.gang import Gangs
from tests.support.tiers.stores import s3_tier

from holdfast_core.errors import RefusedError
from holdfast_core.ids import CheckpointId, Level, RestartRound, Step, TierName
from holdfast_core.messages.schema import (
    GangRequest,
    Inventory,
    Ok,
    Plan,
    Policy,
    Prune,
    Refusal,
    Seal,
)
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration

EVERY_TWO = Policy(interval_steps=1, peer_copies=1, keep_last=2, object_every_steps=2)


def persisted(step: int) -> Callable[[Any], bool]:
    return lambda s: s.last_persisted is not None and s.last_persisted.step == step


async def test_a_gang_that_lost_everything_comes_back_from_the_store(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=EVERY_TWO)
        saved = await gang.commit(2, Level.PERSISTED)
        state = await gang.operator.state_until(0, persisted(2), "step 2 persisted")
        assert state.last_persisted_bytes == sum(map(len, saved.values()))
        tier = s3_tier(store["store"], minio.credentials)
        assert tier.list_manifests("team-a", gang.operator.job_uid) == (
            CheckpointId(Step(2), RestartRound(0)),
        )
        tier.close()
        for worker in (0, 1):
            gang.lose(worker)
        for worker in (0, 1):
            await gang.launch(worker, birth_round=1)
        await gang.begin(1, restore=state.last_persisted, policy=EVERY_TWO)
        for worker in (0, 1):
            _, data, filled = await gang.ranks[worker].restore()
            assert (data, filled.tier) == (saved[worker], TierName.OBJECT)


@pytest.mark.fault("A job is rolled back below its newest persisted step")
async def test_a_gang_that_is_rolled_back_persists_smaller_steps_again(
    gangs: Gangs, store: dict[str, Any], tier: ObjectTier
) -> None:
    """The step that was given up stays in the store, and launchers learn how far the gang had come."""
    async with gangs(2, **store) as gang:
        await gang.start(policy=EVERY_TWO)
        saved = await gang.commit(2, Level.PERSISTED)
        back = (await gang.operator.state_until(0, persisted(2), "step 2")).last_persisted
        await gang.commit(4, Level.PERSISTED)
        await gang.operator.state_until(0, persisted(4), "step 4")
        for worker in (0, 1):
            await gang.operator.seal(worker, 1)
        await gang.begin(1, restore=back, policy=EVERY_TWO, rolled_back_from=5)
        runs = [gang.launchers[worker].run for worker in (0, 1)]
        assert [run is not None and run.rolled_back_from for run in runs] == [5, 5]
        assert await gang.restored() == saved
        await gang.commit(3, Level.REPLICATED)
        await gang.commit(4, Level.PERSISTED)
        found = tier.list_manifests("team-a", gang.operator.job_uid)
        kept = [CheckpointId(Step(step), RestartRound(0)) for step in (2, 4)]
        assert [id_ for id_ in found if id_.round == 0] == kept
        assert CheckpointId(Step(4), RestartRound(1)) in found


async def test_a_sealed_sidecar_lists_what_the_store_has(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    """So the operator finds a checkpoint that no status names."""
    async with gangs(2, **store) as gang:
        await gang.start(policy=EVERY_TWO)
        await gang.commit(2, Level.PERSISTED)
        state = await gang.operator.state_until(0, persisted(2), "step 2 persisted")
        look = Seal(RestartRound(1), look_in_store=True)
        found = await gang.operator.call(1, "/v1/seal", look, Inventory)
        assert found.stored is not None and state.last_persisted is not None
        point = state.last_persisted
        assert found.stored == {point.manifest: CheckpointId(Step(2), RestartRound(0))}


async def test_a_store_that_is_down_holds_up_nothing_else(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer
) -> None:
    """Steps are still committed and replicated.

    The failure is reported until the store is available again.
    """
    async with gangs(2, **store) as gang:
        await gang.start(policy=EVERY_TWO)
        minio.kill()
        try:
            for step in (2, 3, 4):
                await gang.commit(step, Level.REPLICATED)
            await gang.operator.state_until(
                0,
                lambda s: any(f.tier is TierName.OBJECT for f in s.failures),
                "the trouble is shown",
            )
        finally:
            minio.revive()
        state = await gang.operator.state_until(0, persisted(4), "step 4 persisted")
        assert state.last_replicated.step == 4
        await gang.operator.state_until(0, lambda s: not s.failures, "the trouble is over")


async def test_old_steps_leave_the_node_tiers_but_not_what_is_protected(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    """With keep_last 2 of steps 1..6, the pinned step 3, step 5 and the persisted step 6 stay."""
    async with gangs(2, **store) as gang:
        message = await gang.start(policy=Policy(interval_steps=1, peer_copies=1, keep_last=2))
        held = gang.operator.message(
            0, version=2, copies=gang.copies, policy=message.policy, pinned=(3,)
        )
        await gang.operator.round_all(held)
        for step in range(1, 7):
            await gang.commit(step, Level.REPLICATED)
        async with asyncio.timeout(DEADLINE_SECONDS):
            for worker in (0, 1):
                while await _kept(gang.operator, worker) != ({3, 5, 6}, {3, 5, 6}):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def _kept(operator: FakeOperator, worker: int) -> tuple[set[int], set[int]]:
    """Return the steps of the manifests and of the shards on the worker's node tier."""
    found = await operator.inventory(worker)
    on_disk = {s.step for s in found.shards}
    return {m.step for m in found.manifests.values()}, on_disk


async def test_the_operator_deletes_from_the_store_but_never_the_newest(
    gangs: Gangs, store: dict[str, Any], minio: MinioServer
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=EVERY_TWO)
        await gang.commit(2, Level.PERSISTED)
        first = (await gang.operator.state_until(0, persisted(2), "step 2")).last_persisted
        await gang.commit(4, Level.PERSISTED)
        second = (await gang.operator.state_until(0, persisted(4), "step 4")).last_persisted
        with pytest.raises(RefusedError) as refused:
            await gang.operator.call(0, "/v1/prune", Prune(RestartRound(0), (second,)), Ok)
        assert refused.value.code == Refusal.PROTECTED
        await gang.operator.call(0, "/v1/prune", Prune(RestartRound(0), (first,)), Ok)
        tier = s3_tier(store["store"], minio.credentials)
        assert [c.step for c in tier.list_manifests("team-a", gang.operator.job_uid)] == [4]
        tier.close()


async def test_save_now_reaches_rank_0_once_and_what_it_saves_is_persisted(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=Policy(interval_steps=100, peer_copies=1))
        for rank in gang.ranks.values():
            rank.progress(7)
        await gang.operator.state_until(0, lambda s: s.running, "running")
        ask = GangRequest(RestartRound(0), "token-1")
        for _ in range(2):
            await gang.operator.call(0, "/v1/save-now", ask, Ok)
        wanted = Plan(RestartRound(0), save_from=Step(8))
        await until(lambda: wanted in gang.ranks[0].pushed, "the request")
        await gang.operator.call(0, "/v1/stop", GangRequest(RestartRound(0), "token-2"), Ok)
        stop = Plan(RestartRound(0), save_from=Step(8), stop=True)
        await until(lambda: stop in gang.ranks[0].pushed, "the stop is requested")
        assert gang.ranks[0].pushed.count(wanted) == 1
        assert not [m for m in gang.ranks[1].pushed if isinstance(m, Plan)]
        await gang.commit(9, Level.PERSISTED)
        await gang.operator.state_until(0, persisted(9), "step 9 persisted")


@pytest.mark.fault("Two saves are requested before the first request has reached rank 0")
async def test_one_save_fulfils_two_requests_in_quick_succession(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    async with gangs(2, **store) as gang:
        await gang.start(policy=Policy(interval_steps=100, peer_copies=1))
        for rank in gang.ranks.values():
            rank.progress(7)
        await gang.operator.state_until(0, lambda s: s.running, "running")
        asks = [GangRequest(RestartRound(0), f"token-{n}") for n in range(2)]
        await asyncio.gather(*(gang.operator.call(0, "/v1/save-now", ask, Ok) for ask in asks))
        wanted = Plan(RestartRound(0), save_from=Step(8))
        await until(lambda: wanted in gang.ranks[0].pushed, "the request")
        await gang.commit(8, Level.PERSISTED)
        await gang.operator.state_until(0, persisted(8), "step 8 persisted")
        assert gang.ranks[0].pushed.count(wanted) == 1


async def test_the_gang_finishes_once_the_operator_has_recorded_the_last_step(
    gangs: Gangs, store: dict[str, Any]
) -> None:
    """The last step is persisted although no interval includes it.

    The launchers are released only after the operator has acknowledged the report.
    """
    async with gangs(2, **store) as gang:
        await gang.start(policy=Policy(interval_steps=1, peer_copies=1))
        await gang.commit(3, Level.REPLICATED)
        for rank in gang.ranks.values():
            rank.close()  # a launcher has finished when its ranks have exited
        waiting = [asyncio.create_task(launcher.finish()) for launcher in gang.launchers.values()]
        state = await gang.operator.state_until(
            0, lambda s: s.finished, "finished", acknowledge=False
        )
        assert persisted(3)(state)
        assert not any(task.done() for task in waiting)
        await gang.operator.state(0, since=state.version)
        await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_SECONDS)
