"""A failure interrupts a commit. The operator has real sidecars finish it, and its bytes are restored."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.support.sidecar.gang import JOB_UID, NAMESPACE, Gang, Gangs, payload

from holdfast_core.errors import HoldfastError, RefusedError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import JobIdentity, Manifest, manifest_digest, manifest_shards
from holdfast_core.ids import JobUid, Level, RestartRound, Step
from holdfast_core.messages.schema import FinishCommit, Inventory, Refusal, RestorePoint

pytestmark = pytest.mark.integration

SAVED = {worker: payload(2, worker) for worker in range(2)}
"""What the ranks save as step 2."""


async def interrupted(gang: Gang) -> tuple[Inventory, Inventory]:
    """Commit step 1, and interrupt the commit of step 2: its coordinator is sealed before worker 1 writes."""
    await gang.start()
    await gang.commit(1, Level.REPLICATED)
    await gang.ranks[0].save(2, SAVED[0])
    first = await gang.operator.seal(0, 1)
    await gang.ranks[1].save(2, SAVED[1])
    return first, await gang.operator.seal(1, 1)


def manifest_of(*sealed: Inventory, job_uid: str = JOB_UID) -> Manifest:
    found = [item for inventory in sealed for item in inventory.uncommitted]
    return Manifest(
        job=JobIdentity(NAMESPACE, "gpt", JobUid(job_uid)),
        step=Step(2),
        restart_round=RestartRound(0),
        world_size=2,
        parent=None,
        shards=manifest_shards([(i.shard, i.layout) for i in found]),
    )


async def finish(gang: Gang, worker: int, manifest: Manifest, round_: int = 1) -> Inventory:
    text = manifest.to_bytes().decode()
    message = FinishCommit(RestartRound(round_), text)
    return await gang.operator.call(worker, "/v1/finish-commit", message, Inventory)


def point_of(manifest: Manifest) -> RestorePoint:
    return RestorePoint(Step(2), RestartRound(0), manifest_digest(manifest.to_bytes()))


async def test_a_sealed_sidecar_lists_its_own_shards_without_a_manifest(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        for worker, inventory in enumerate(await interrupted(gang)):
            assert [m.step for m in inventory.manifests.values()] == [1]
            (found,) = inventory.uncommitted
            assert (found.step, found.round, found.world_size) == (2, 0, 2)
            assert found.shard.rank == worker
            assert found.shard.payload_bytes == len(SAVED[worker])
            assert {s.blake3 for s in inventory.shards if s.step == 2} == {found.shard.blake3}


async def test_a_finished_commit_is_restored_with_the_saved_bytes(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        manifest = manifest_of(*await interrupted(gang))
        inventory = await finish(gang, 0, manifest)
        assert [(m.step, m.round) for m in inventory.manifests.values()] == [(1, 0), (2, 0)]
        assert inventory.uncommitted == ()
        await gang.begin(1, restore=point_of(manifest))
        assert await gang.restored() == SAVED
        await gang.commit(3, Level.REPLICATED)


@pytest.mark.fault("The process that finished an interrupted commit is killed")
async def test_a_finished_commit_outlives_the_process_that_wrote_it(gangs: Gangs) -> None:
    """Also if the operator dies now, the next one finds the step by its manifest."""
    async with gangs(2) as gang:
        manifest = manifest_of(*await interrupted(gang))
        await finish(gang, 0, manifest)
        gang.sidecars[0].kill()
        await gang.relaunch(0)
        again = await gang.operator.seal(0, 1)
        assert list(again.manifests)[1:] == [point_of(manifest).manifest]
        repeated = await finish(gang, 0, manifest)
        assert repeated.manifests == again.manifests


async def test_a_commit_that_was_not_finished_leaves_nothing_behind(gangs: Gangs) -> None:
    """The operator has chosen step 1: step 2 is off the lineage and will be trained again."""
    async with gangs(2) as gang:
        await interrupted(gang)
        first = next(iter((await gang.operator.inventory(0)).manifests))
        await gang.begin(1, restore=RestorePoint(Step(1), RestartRound(0), first))
        for worker in range(2):
            inventory = await gang.operator.inventory(worker)
            assert inventory.uncommitted == ()
            assert {s.step for s in inventory.shards} <= {1}


@pytest.mark.fault(
    "A manifest for an interrupted commit names another shard, another job or another step"
)
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"job": JobIdentity(NAMESPACE, "gpt", JobUid("another"))}, "another"),
        ({"job": JobIdentity("another", "gpt", JobUid(JOB_UID))}, "another"),
        ({"step": Step(3)}, "not on the node tier"),
    ],
    ids=["another job", "another namespace", "another step"],
)
async def test_a_manifest_of_something_else_is_refused(
    gangs: Gangs, change: dict[str, object], expected: str
) -> None:
    async with gangs(2) as gang:
        manifest = msgspec.structs.replace(manifest_of(*await interrupted(gang)), **change)  # type: ignore[arg-type]
        with pytest.raises(HoldfastError, match=expected):
            await finish(gang, 0, manifest)
        assert len((await gang.operator.inventory(0)).manifests) == 1


async def test_a_manifest_that_names_another_shard_is_refused(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        first, second = await interrupted(gang)
        (item,) = first.uncommitted
        other = replace(item, shard=replace(item.shard, blake3=digest_of(b"another")))
        manifest = manifest_of(replace(first, uncommitted=(other,)), second)
        with pytest.raises(HoldfastError, match="not on the node tier"):
            await finish(gang, 0, manifest)
        with pytest.raises(RefusedError) as refused:
            await finish(gang, 0, manifest, round_=2)
        assert refused.value.code is Refusal.NOT_SEALED


async def test_after_round_no_commit_is_finished(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        manifest = manifest_of(*await interrupted(gang))
        first = next(iter((await gang.operator.inventory(0)).manifests))
        await gang.begin(1, restore=RestorePoint(Step(1), RestartRound(0), first))
        with pytest.raises(RefusedError) as refused:
            await finish(gang, 0, manifest)
        assert refused.value.code is Refusal.NOT_SEALED
