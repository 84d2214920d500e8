"""How a member stores the manifests that the plan names, and what it deletes when it is told to."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, manifest, shard_file, shard_header
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import accepted, first_round, round_message
from tests.support.sidecar.waiting import until

from holdfast_core.errors import CapacityError, UnreadableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, ShardRef, Step
from holdfast_core.messages.schema import Plan, StepOutcome
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.save.staging import Room
from holdfast_core.tasks import Signal
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.gang.state import RankNotices
from holdfast_sidecar.process.control import ManifestRequests, Pruner
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.wire.intake import LocalConnections

DATA = b"x" * 1000
HEADER = shard_header(len(DATA), job_uid=CONTRACT.job_uid, world_size=2)
_, RECORD = shard_file(HEADER, DATA)
CHECKPOINT = (HEADER.step, HEADER.round)
POINT_ID = CheckpointId(*CHECKPOINT)
OTHER = replace(RECORD, header=replace(RECORD.header, rank=Rank(1)))
DOCUMENT = manifest([RECORD, OTHER]).to_bytes()


class PlayedStager:
    """A stager without slots."""

    def __init__(self) -> None:
        self.slot_writes = SimpleNamespace(room=Room())
        self.changed = Signal[[]]()
        self.waits: tuple[Step, ...] = ()
        self.forgotten: list[frozenset[Step]] = []

    def waiting(self, rank: Rank) -> tuple[Step, ...]:
        return self.waits

    def choose(self, step: Step | None) -> None:
        return

    def forget(self, steps: frozenset[Step]) -> None:
        self.waits = tuple(step for step in self.waits if step not in steps)
        self.forgotten.append(steps)
        self.changed()


class World:
    """Worker 0, with stand-ins for its slots and for its table of shards."""

    def __init__(self, root: Path) -> None:
        self.node = DiskNodeTier(root, capacity_bytes=1 << 30)
        self.node.open()
        self.pools = Pools(disk=1, fetch=1, store=1)
        self.stager = PlayedStager()
        self.copied: list[tuple[Step, RestartRound]] = []
        self.released: list[RestartRound] = []
        self.current = CurrentRound(first_round())
        self.clock = ManualClock()
        pod = Pod(Settings(CONTRACT), self.clock, self.current)
        tiers = Tiers(self.node, None, self.pools)
        failures = Failures(lambda: None)
        self.lost: list[Step] = []
        saves: Any = SimpleNamespace(
            stager=self.stager,
            flow=SimpleNamespace(
                committed=lambda step, round_: self.copied.append((step, round_)),
                is_committed=lambda step, round_: (step, round_) in self.copied,
                has_lost=self.lost.append,
                forget=lambda steps: None,
                dropped=frozenset({Step(5)}),
            ),
        )
        no_peers: Any = None
        self.sent = [DOCUMENT]
        """What the coordinator sends, one after another. The last one is sent again."""
        self.asked = 0
        self.failures = failures
        self.manifests = ManifestRequests(
            pod, tiers, saves, failures, no_peers, lambda checkpoint: self._sent()
        )
        notices = RankNotices(self.current, LocalConnections())
        self.copies = IncomingCopies(pod, tiers, no_peers, lambda step: False)
        self.pruner = Pruner(
            pod, tiers, saves, self.copies, notices, self.released.append, failures
        )

    async def go_on(self) -> None:
        """Let the next pause end."""
        for _ in range(50):
            await asyncio.sleep(0)
        await self.pools.read.run(len, ())
        self.clock.advance(20.0)
        for _ in range(50):
            await asyncio.sleep(0)

    def _sent(self) -> bytes:
        self.asked += 1
        return self.sent.pop(0) if len(self.sent) > 1 else self.sent[0]

    def take(self, *checkpoints: CheckpointId) -> None:
        named = tuple((checkpoint, digest_of(DOCUMENT)) for checkpoint in checkpoints)
        self.manifests.take(Plan(HEADER.round, manifests=named))

    async def close(self) -> None:
        await self.manifests.close()
        await self.pruner.close()
        self.pools.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.fault("A node has lost its shard of a step when the manifest arrives")
async def test_a_manifest_without_its_shard_is_not_stored_and_the_step_is_lost(
    world: World,
) -> None:
    world.take(POINT_ID)
    await until(lambda: world.lost == [HEADER.step], "the step is lost")
    assert world.node.list_manifests() == ()
    await world.close()


@pytest.mark.fault("A step is given up while a node has no room for its manifest")
async def test_a_manifest_that_is_wanted_no_more_is_no_failure(world: World) -> None:
    """While a node reports that it has no room, checkpoints are pruned that would be kept otherwise."""
    world.node.write_shard(HEADER, BytesSource(DATA))

    def full(*_: object) -> None:
        raise CapacityError("no room for the manifest")

    world.node.put_manifest = full  # type: ignore[method-assign, assignment]
    world.take(POINT_ID)
    await until(lambda: bool(world.failures.current), "the failure is reported")
    world.take()
    await world.go_on()
    assert world.failures.current == ()
    await world.close()


async def test_copies_begin_when_the_manifest_is_there(world: World) -> None:
    world.node.write_shard(HEADER, BytesSource(DATA))
    world.take(POINT_ID)
    world.take(POINT_ID)
    await until(lambda: world.copied == [CHECKPOINT], "the manifest is stored")
    assert world.node.get_manifest(CONTRACT.job_uid, POINT_ID) == DOCUMENT
    world.take(POINT_ID)
    for _ in range(50):
        await asyncio.sleep(0)
    assert (world.copied, world.asked) == ([CHECKPOINT], 1), "it is fetched and stored once"
    assert await world.manifests.get(None, POINT_ID) == DOCUMENT
    await world.close()


@pytest.mark.fault("The coordinator sends another document than its plan names")
async def test_only_the_document_that_the_plan_names_is_stored(world: World) -> None:
    world.node.write_shard(HEADER, BytesSource(DATA))
    world.sent = [b"{}", DOCUMENT]
    world.take(POINT_ID)
    await until(lambda: world.asked == 1, "it is fetched")
    assert world.node.list_manifests() == ()
    await world.go_on()
    await until(lambda: world.copied == [CHECKPOINT], "the manifest is stored")
    await world.close()


@pytest.mark.fault("A manifest of another step or job arrives under a step's name")
async def test_a_manifest_of_another_step_is_a_failure_and_not_stored(world: World) -> None:
    world.node.write_shard(HEADER, BytesSource(DATA))
    world.take(CheckpointId(Step(HEADER.step + 1), HEADER.round))
    await until(lambda: bool(world.failures.current), "it is a failure")
    assert world.node.list_manifests() == ()
    assert world.copied == []
    await world.close()


async def test_a_manifest_that_the_plan_names_no_longer_is_not_fetched_again(world: World) -> None:
    world.sent = [b"{}"]
    world.take(POINT_ID)
    await until(lambda: world.asked == 1, "it is fetched")
    world.take()
    for _ in range(5):
        await world.go_on()
    assert world.asked == 1
    await world.close()


async def test_a_request_waits_for_a_manifest_that_the_plan_names(world: World) -> None:
    """A relay has the plan before it has the manifest."""
    world.sent = [b"{}", DOCUMENT]
    world.take(POINT_ID)
    found = asyncio.create_task(world.manifests.get(None, POINT_ID))
    await until(lambda: world.asked == 1, "it is fetched")
    assert not found.done()
    await world.go_on()
    assert await found == DOCUMENT
    await world.close()


async def test_no_manifest_is_stored_after_a_seal(world: World) -> None:
    world.node.write_shard(HEADER, BytesSource(DATA))
    world.take(POINT_ID)
    world.current.state = world.current.state.sealed_for(RestartRound(1))
    for _ in range(5):
        await world.go_on()
    assert world.node.list_manifests() == ()
    await world.close()


@pytest.mark.fault("A rank goes back and saves a step again that was dropped")
async def test_a_dropped_step_that_is_saved_again_does_not_keep_its_slot(world: World) -> None:
    world.stager.waits = (Step(5), Step(6))
    world.stager.changed()
    await asyncio.sleep(0)
    assert world.stager.forgotten == [{5}]
    assert world.stager.waits == (6,)
    await world.close()


async def test_a_prune_deletes_nothing_after_a_seal(world: World) -> None:
    """The inventory that answers the seal lists the shard, and the next round may start from it."""
    world.node.write_shard(HEADER, BytesSource(DATA))
    world.pruner.take(Plan(HEADER.round, drop=(HEADER.step,)))
    world.current.state = world.current.state.sealed_for(RestartRound(1))
    await asyncio.sleep(0)
    await world.pools.meta.run(len, ())
    await asyncio.sleep(0)
    await world.pools.shard.run(len, ())
    assert len(world.node.list_shards()) == 1
    await world.close()


@pytest.mark.fault("A round is sealed between two deletions of a plan")
async def test_a_prune_that_a_seal_overtakes_deletes_no_orphans(world: World) -> None:
    """The operator may finish their commit: the inventory that answers the seal lists them."""
    deleting, go_on, delete = threading.Event(), threading.Event(), world.node.delete_shard
    world.current.state = accepted(round_message(1))
    orphan, dropped = HEADER, replace(HEADER, step=Step(HEADER.step + 1), round=RestartRound(1))
    for header in (orphan, dropped):
        world.node.write_shard(header, BytesSource(DATA))

    def slow(ref: ShardRef) -> None:
        deleting.set()
        assert go_on.wait(HANG_SECONDS)
        delete(ref)

    world.node.delete_shard = slow  # type: ignore[method-assign]
    newer = StepOutcome(Step(HEADER.step + 2), RestartRound(1), Level.REPLICATED)
    world.pruner.take(Plan(RestartRound(1), levels=(newer,), drop=(dropped.step,)))
    assert await asyncio.to_thread(deleting.wait, HANG_SECONDS)
    world.current.state = world.current.state.sealed_for(RestartRound(2))
    go_on.set()
    await until(lambda: "prune" not in {t.get_name() for t in asyncio.all_tasks()}, "its end")
    assert [record.header.step for record in world.node.list_shards()] == [orphan.step]
    await world.close()


@pytest.mark.fault("A disk does not delete one file, for days")
async def test_a_step_that_cannot_be_deleted_keeps_no_other_one(world: World) -> None:
    """One search goes on for it, however many plans follow. The failure stays until it is deleted."""
    steps = [Step(step) for step in range(1, 6)]
    for step in steps:
        world.node.write_shard(replace(HEADER, step=step), BytesSource(DATA))
    delete = world.node.delete_shard
    refuses = True

    def refusing(ref: ShardRef) -> None:
        if refuses and ref.step == steps[0]:
            raise UnreadableError("EIO")
        delete(ref)

    world.node.delete_shard = refusing  # type: ignore[method-assign]
    for count in range(1, 5):
        world.pruner.take(Plan(HEADER.round, drop=tuple(steps[:count])))
        left = 6 - count
        await until(
            lambda left=left: len(world.node.list_shards()) == left,  # type: ignore[misc]
            "the others are deleted, without a pause",
        )
        await until(lambda: bool(world.failures.current), "the failure is reported")
    for _ in range(5):
        await world.go_on()
        assert [t.get_name() for t in asyncio.all_tasks()].count("prune") == 1
    await until(lambda: world.clock.sleepers, "the pause after an attempt")
    refuses = False
    await world.go_on()
    await until(lambda: not world.failures.current, "the step is deleted")
    assert [record.header.step for record in world.node.list_shards()] == [steps[-1]]
    await world.close()


async def test_a_plan_that_only_releases_the_pod_is_carried_out(tmp_path: Path) -> None:
    """It is the last plan of a round, and nothing else of it has changed."""
    world = World(tmp_path)
    world.pruner.take(Plan(RestartRound(0)))
    assert world.released == []
    world.pruner.take(Plan(RestartRound(0), released=True))
    assert world.released == [RestartRound(0)]
    await world.pruner.close()
    world.pools.close()
