"""Which messages the coordinator accepts, which checkpoints it prunes, and which step it uploads last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.coordinators import CoordinatorWorld
from tests.support.sidecar.ledgers import LAYOUT, OTHER_DIGEST, shard_info
from tests.support.sidecar.waiting import until
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.errors import AlreadyExistsError, RefusedError
from holdfast_core.ids import Level, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import (
    Failure,
    Ok,
    Plan,
    Policy,
    Prune,
    RankSaves,
    Refusal,
    RestorePoint,
    StoredAs,
)
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.base.telemetry import reason_of
from holdfast_sidecar.coordinator.ledger import StepEntry
from holdfast_sidecar.coordinator.plan import build_manifest

ROUND = RestartRound(1)
BEFORE = RestartRound(0)
RANKS = (0, 1)


class Members:
    """Two members that accept everything."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    async def call(self, worker: Worker, message: Any, reply: type[Any], **_: Any) -> Ok:
        await asyncio.sleep(0)
        self.received.append(message)
        return Ok(ROUND)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]


class World(CoordinatorWorld):
    """The coordinator of round 1, whose ranks the test plays."""

    def prepare(self, step: int) -> list[Ok]:
        return self.hold(step)

    def report(self, *waiting: int, done: bool = False, ranks: Iterable[int] = RANKS) -> None:
        """Let every rank, or some, report the steps that wait in its slots."""
        steps = tuple(map(Step, waiting))
        for rank in ranks:
            saves = (RankSaves(Rank(rank), steps[-1], steps, steps),) if steps else ()
            self.tell(rank, saves=saves, done=done)

    async def reaches(self, level: Level, step: int) -> None:
        await until(lambda: self.coordinator.levels()[level] == step, f"step {step} is {level}")

    async def replicate(self, step: int) -> None:
        self.prepare(step)
        await self.reaches(Level.LOCAL, step)
        self.hold(step, replicated=True)


def point(step: int) -> RestorePoint:
    return RestorePoint(Step(step), BEFORE)


@pytest.mark.parametrize(("step", "refused"), [(29, True), (30, True), (31, False)])
async def test_a_shard_of_the_restore_point_or_below_is_refused(
    tmp_path: Path, step: int, refused: bool
) -> None:
    """Such a step would be a second checkpoint of the step that the round was restored from."""
    async with World(tmp_path, Members(), round=ROUND, restore_point=point(30)) as world:
        if not refused:
            assert [reply.refused for reply in world.prepare(step)] == [(), ()]
            return
        for reply in world.prepare(step):
            (refusal,) = reply.refused
            assert refusal.reason == Refusal.BAD_REQUEST
            assert "not above the restore point" in refusal.message


async def test_a_quarantined_checkpoint_takes_no_place_of_one_that_can_be_restored(
    tmp_path: Path,
) -> None:
    members = Members()
    policy = Policy(interval_steps=1, keep_last=3, peer_copies=1)
    fields: dict[str, Any] = {"round": ROUND, "restore_point": point(30)}
    async with World(tmp_path, members, policy, quarantined=(point(20),), **fields) as world:
        world.coordinator.start()
        for rank in RANKS:
            world.tell(rank, manifests=tuple(point(s).own_checkpoint for s in (5, 10, 20, 30)))
        await world.replicate(40)
        await until(lambda: any(m.drop for m in members.of(Plan)), "steps are pruned")
        assert {m.drop for m in members.of(Plan)} - {()} == {(Step(5),)}, "40, 30, 10 stay"


@pytest.mark.parametrize(
    ("step", "protected"),
    [
        pytest.param(30, True, id="the restore point"),
        pytest.param(25, True, id="pinned by the user"),
        pytest.param(27, True, id="the newest in the store"),
        pytest.param(20, False, id="an older one"),
    ],
)
async def test_the_operator_cannot_delete_what_a_restore_needs_from_the_store(
    tmp_path: Path, step: int, protected: bool
) -> None:
    """Its view of the job may be older than that of the coordinator."""
    store = ObjectTier(MemoryObjectStore())
    fields: dict[str, Any] = {
        "round": ROUND,
        "restore_point": point(30),
        "pinned": (Step(25),),
        "last_persisted": point(27),
    }
    async with World(tmp_path, Members(), None, store, **fields) as world:
        request = Prune(ROUND, (point(20), point(step)))
        if not protected:
            await world.coordinator.prune(request)
            return
        with pytest.raises(RefusedError) as found:
            await world.coordinator.prune(request)
        assert found.value.code is Refusal.PROTECTED


@pytest.mark.fault("All ranks return while a step waits in slots")
async def test_the_end_of_a_job_uploads_the_step_that_waits_in_slots_and_not_an_older_one(
    tmp_path: Path,
) -> None:
    """An upload of the older step first would take as long again, while the pods wait for their end."""
    members = Members()
    store = ObjectTier(MemoryObjectStore())
    policy = Policy(interval_steps=1, slots=3)
    async with World(tmp_path, members, policy, store, round=ROUND) as world:
        world.coordinator.start()
        world.prepare(1)
        await world.reaches(Level.LOCAL, 1)
        world.report(2)
        world.report(2, done=True)
        await until(lambda: any(m.write for m in members.of(Plan)), "the step that waits is chosen")
        assert {m.write for m in members.of(Plan)} == {None, 2}
        for _ in range(200):  # every loop of the coordinator looks at the reports
            await asyncio.sleep(0)
        assert {m.upload for m in members.of(Plan)} == {None}
        world.prepare(2)
        world.report(done=True)
        await world.reaches(Level.LOCAL, 2)
        await until(lambda: any(m.upload for m in members.of(Plan)), "the newest step is uploaded")
        assert {m.upload.checkpoint.step for m in members.of(Plan) if m.upload is not None} == {2}


@pytest.mark.fault("A shard is damaged on its node before it was uploaded")
async def test_an_upload_that_cannot_end_does_not_hold_up_the_later_ones(tmp_path: Path) -> None:
    members = Members()
    store = ObjectTier(MemoryObjectStore())
    policy = Policy(interval_steps=1, object_every_steps=10)
    async with World(tmp_path, members, policy, store, round=ROUND) as world:
        world.coordinator.start()
        for step in (10, 11):
            world.prepare(step)
            await world.reaches(Level.LOCAL, step)
        await until(lambda: any(m.upload for m in members.of(Plan)), "step 10 is uploaded")
        world.tell(1, lost=(Step(10),))
        world.prepare(12)
        await until(
            lambda: (
                {m.upload.checkpoint.step for m in members.of(Plan) if m.upload is not None}
                == {10, 12}
            ),
            "the next step is uploaded in its place",
        )


@pytest.mark.fault("The store holds other bytes under a shard's name, and does not replace them")
async def test_an_upload_whose_name_is_taken_does_not_hold_up_the_later_ones(
    tmp_path: Path,
) -> None:
    members = Members()
    store = ObjectTier(MemoryObjectStore())
    policy = Policy(interval_steps=1, object_every_steps=10)
    taken = AlreadyExistsError("expected 5 bytes, found 4 bytes")
    async with World(tmp_path, members, policy, store, round=ROUND) as world:
        world.coordinator.start()
        world.prepare(10)
        await world.reaches(Level.LOCAL, 10)
        await until(lambda: any(m.upload for m in members.of(Plan)), "step 10 is uploaded")
        failure = Failure(Step(10), TierName.OBJECT, reason_of(TierName.OBJECT, taken), str(taken))
        world.tell(1, failures=(failure,))
        world.prepare(11)
        await world.reaches(Level.LOCAL, 11)
        world.tell(1, failures=(failure,))
        await until(
            lambda: (
                {m.upload.checkpoint.step for m in members.of(Plan) if m.upload is not None}
                == {10, 11}
            ),
            "the next step is uploaded in its place",
        )


@pytest.mark.fault("The store holds another manifest of the last step of a gang")
async def test_a_manifest_that_conflicts_at_the_end_is_not_put_again_without_a_pause(
    tmp_path: Path,
) -> None:
    entry = StepEntry(Step(1), ROUND, 2)
    for rank in map(Rank, RANKS):
        entry.shards[rank], entry.layouts[rank] = shard_info(rank, OTHER_DIGEST), LAYOUT
    other = build_manifest(CONTRACT, None, entry).manifest
    store = ObjectTier(MemoryObjectStore())
    store.put_manifest(CONTRACT.namespace, CONTRACT.job_uid, entry.checkpoint, other)
    policy = Policy(interval_steps=1)
    async with World(tmp_path, Members(), policy, store, round=ROUND) as world:
        world.coordinator.start()
        world.prepare(1)
        await world.reaches(Level.LOCAL, 1)
        idle = world.clock.sleepers
        for rank in RANKS:
            shard = replace(world.shard(rank, 1), committed=True, uploaded=StoredAs())
            world.tell(rank, shards=(shard,), done=True)
        await until(lambda: world.clock.sleepers > idle, "a pause")


@pytest.mark.fault("A shard is damaged on its node before it was copied")
async def test_a_step_that_was_lost_before_its_copies_protects_nothing(tmp_path: Path) -> None:
    """Otherwise it would take the place of a checkpoint that can be read."""
    members = Members()
    policy = Policy(interval_steps=1, keep_last=2, peer_copies=1)
    async with World(tmp_path, members, policy, round=ROUND) as world:
        world.coordinator.start()
        for step in (10, 20):
            await world.replicate(step)
            await world.reaches(Level.REPLICATED, step)
        world.prepare(30)
        await world.reaches(Level.LOCAL, 30)
        world.tell(1, lost=(Step(30),))
        await world.replicate(40)
        await until(lambda: any(m.drop for m in members.of(Plan)), "steps are pruned")
        dropped = {step for m in members.of(Plan) for step in m.drop}
        assert dropped == {10, 30}, "40 and 20 stay"
