"""A node without room: the coordinator makes room without waiting for another report."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB_UID
from tests.support.sidecar import FakeRank, until
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.coordinators import CoordinatorWorld
from tests.support.sidecar.rounds import first_round
from tests.support.sidecar.stagers import stager_of
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import CapacityError, UnavailableError
from holdfast_core.ids import Level, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import (
    Failure,
    Ok,
    Plan,
    Policy,
    Progress,
)
from holdfast_core.save.staging import WriteOutcome
from holdfast_core.tiers.base import PayloadSource, ShardHeader, ShardRecord
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import NODE_FULL, Failures
from holdfast_sidecar.base.tiers import Pools

ROUND = RestartRound(0)
PAYLOAD = bytes(range(256)) * 16


class Members:
    """Two members that accept everything and have no inventory."""

    def __init__(self) -> None:
        self.pruned: set[Step] = set()

    async def call(self, worker: Worker, message: Any, reply: type[Any], **_: Any) -> Ok:
        if isinstance(message, Plan):
            self.pruned.update(message.drop)
        return Ok(ROUND)

    async def get(self, worker: Worker, path: str, reply: type[Any], **_: Any) -> Any:
        raise UnavailableError(f"GET {path} to worker {worker}: it is away")


class World(CoordinatorWorld):
    """A gang that keeps three steps."""

    def __init__(self, folder: Path) -> None:
        self.members = Members()
        super().__init__(folder, self.members, Policy(interval_steps=1, keep_last=3))
        self.coordinator.start()

    async def commit(self, step: int) -> None:
        """Make the step replicated, without a report of a member."""
        self.hold(step)
        await until(lambda: self.coordinator.levels()[Level.LOCAL] == step, f"{step} is local")
        self.hold(step, replicated=True)

    def report(self, step: int, *failures: Failure) -> None:
        """Report that worker 1 has finished this step."""
        progress = (Progress(ROUND, Rank(1), Step(step)),)
        self.tell(1, progress=progress, failures=failures)

    async def pruned(self, *steps: int) -> None:
        await until(lambda: self.members.pruned == set(steps), f"exactly {steps} are pruned")


def full(step: int) -> Failure:
    return Failure(Step(step), TierName.NODE, NODE_FULL, "no room")


@pytest.mark.fault("A volume is full, a newer step is committed, and no further report comes")
async def test_a_step_that_is_committed_later_makes_room(tmp_path: Path) -> None:
    """One report names a full volume, and no report follows. Each later commit releases an older step."""
    async with World(tmp_path) as world:
        await world.commit(1)
        world.report(2, full(2))
        await world.commit(2)
        world.clock.advance(1.0)
        await world.pruned(1)
        await world.commit(3)
        world.clock.advance(1.0)
        await world.pruned(1, 2)


@pytest.mark.fault("A full volume is reported within a second of the last pruning")
async def test_a_report_that_comes_right_after_a_pruning_is_not_lost(tmp_path: Path) -> None:
    """Steps are pruned for lack of room at most once a second. A report within that second is acted on at
    its end, without another report."""
    async with World(tmp_path) as world:
        for step in (1, 2, 3):
            await world.commit(step)
        world.report(4, full(4))
        await world.pruned(1)
        world.report(4, full(4))
        world.clock.advance(1.0)
        await world.pruned(1, 2)


@pytest.mark.fault("A full volume has room again")
async def test_no_step_is_deleted_once_there_is_room(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        for step in (1, 2, 3):
            await world.commit(step)
        world.report(4, full(4))
        await world.pruned(1)
        world.report(4)
        for step in (4, 5):
            world.clock.advance(1.0)
            await world.commit(step)
        await world.pruned(1, 2)  # the steps that keep_last=3 releases
        world.report(6, full(6))
        await world.pruned(1, 2, 3)


class FullOnce(ScratchTier):
    """A tier that has no room at first. After that, a write waits until the test lets it continue."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.let = threading.Event()

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        self.writes += 1
        if self.writes == 1:
            raise CapacityError("no room")
        assert self.let.wait(HANG_SECONDS)
        return super().write_shard(header, source)


@pytest.mark.fault("A slow write that has room again reports a full volume")
async def test_a_write_that_has_room_again_reports_no_failure(tmp_path: Path) -> None:
    """While the failure is reported, older steps are pruned, and a write of a large shard takes long."""
    node, pools, failures = FullOnce(), Pools(disk=1, fetch=1, store=1), Failures(lambda: None)
    settings = Settings(contract_with(shared_dir=str(tmp_path)))
    outcomes: list[WriteOutcome] = []
    state = first_round()
    stager = stager_of(settings, state, node, pools, failures)
    stager.ended.subscribe(outcomes.append)
    rank = FakeRank(tmp_path, JOB_UID, 0, 0)
    await stager.stage(lambda: state, rank.fill(7, PAYLOAD))
    await until(lambda: [f.reason for f in failures.current] == [NODE_FULL], "a failure")
    stager.slot_writes.room.made()
    await until(lambda: node.writes == 2, "a second write")
    assert failures.current == ()
    node.let.set()
    await until(lambda: outcomes, "the outcome")
    assert outcomes[0].record is not None
    pools.close()
