"""When the reporter sends, when its report lists the shards, and what it does with the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.shards.builders import BytesSource, shard_header
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.flows import AcceptingMember, FlowWorld, running_flow
from tests.support.sidecar.rounds import first_round
from tests.support.sidecar.waiting import until

from holdfast_core.clock import SystemClock
from holdfast_core.errors import UnavailableError
from holdfast_core.ids import RestartRound, TierName, Worker
from holdfast_core.messages.schema import Failure, Ok, WorkerReport, WorkerReports
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import RestoreFailures
from holdfast_sidecar.gang.state import LocalGang, Reporter, Sources
from holdfast_sidecar.save.flow import own_shard

NEVER_SECONDS = 3600.0


class Coordinator:
    """A coordinator whose next replies the test sets."""

    def __init__(self) -> None:
        self.received: list[WorkerReport] = []
        self.replies: list[dict[str, Any]] = []
        self.away = False

    async def call(self, worker: Worker, message: WorkerReports, kind: type[Any]) -> Ok:
        await asyncio.sleep(0)
        if self.away:
            raise UnavailableError("it is away")
        self.received.extend(message.reports)
        fields = self.replies.pop(0) if self.replies else {}
        return Ok(RestartRound(0), **fields)


class Nothing:
    """Parts of the sidecar that have nothing to report."""

    idle = True
    current = ()
    restored = None
    seconds = None
    failures = RestoreFailures(lambda: None)

    def newest(self, rank: int) -> None:
        return None


class World:
    def __init__(self, flow: FlowWorld, coordinator: Coordinator) -> None:
        self.flow = flow
        self.coordinator = coordinator
        nothing = cast(Any, Nothing())
        # Only a change that others wait for, or a reply, makes it send again.
        settings = Settings(
            contract_with(),
            heartbeat_seconds=NEVER_SECONDS,
            report_interval_seconds=NEVER_SECONDS,
        )
        self.gang = LocalGang(1)
        self.reporter = Reporter(
            Pod(settings, SystemClock(), CurrentRound(first_round())),
            Sources(self.gang, flow.flow, nothing, nothing, flow.failures),
            cast(Any, coordinator),
            lambda: None,
        )
        self.reporter.start()

    async def save(self) -> None:
        record = self.flow.node.write_shard(shard_header(1000), BytesSource(bytes(1000)))
        self.flow.flow.add(own_shard(record))
        await self.flow.until_idle()
        self.reporter.changed()

    async def sent(self, count: int) -> WorkerReport:
        await until(lambda: len(self.coordinator.received) == count, f"{count} reports are sent")
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(self.coordinator.received) == count, "and no further one"
        return self.coordinator.received[-1]


@asynccontextmanager
async def reporting(folder: Path) -> AsyncIterator[World]:
    async with running_flow(folder, AcceptingMember()) as flow:
        world = World(flow, Coordinator())
        try:
            world.reporter.changed()
            await world.sent(1)
            yield world
        finally:
            await world.reporter.close()


async def test_a_durable_shard_is_reported_at_once_and_listed_until_it_is_known(
    tmp_path: Path,
) -> None:
    async with reporting(tmp_path) as world:
        await world.save()
        report = await world.sent(2)
        assert [s.step for s in report.shards] == [s.ref.step for s in world.flow.flow.shards()]
        assert world.flow.flow.is_known
        world.gang.ends = True
        world.reporter.changed()
        assert (await world.sent(3)).shards == (), "the coordinator has them"
        (shard,) = world.flow.flow.shards()
        world.flow.flow.committed(shard.key.step, shard.key.round)
        world.reporter.changed()
        (short,) = (await world.sent(4)).shards
        assert (short.committed, short.layout) == (True, None), "it has the layout, too"


@pytest.mark.fault("The process of the coordinator restarts and has no shards")
async def test_the_shards_are_sent_again_to_a_coordinator_that_wants_them(tmp_path: Path) -> None:
    async with reporting(tmp_path) as world:
        await world.save()
        listed = (await world.sent(2)).shards
        world.coordinator.replies = [{"wants_shards": (Worker(0),)}]
        world.gang.ends = True
        world.reporter.changed()
        again = await world.sent(4)
        assert again.shards == listed
        assert world.flow.flow.is_known


async def test_a_dropped_shard_is_deleted_and_a_refused_one_is_a_failure(tmp_path: Path) -> None:
    async with reporting(tmp_path) as world:
        flow = world.flow.flow
        await world.save()
        (shard,) = flow.shards()
        refused = Failure(shard.ref.step, TierName.PEER, "Conflict", "another digest", Worker(0))
        await world.sent(2)
        flow.reported(flow.table, refused)
        assert [f.reason for f in world.flow.failures.current] == ["Conflict"]
        flow.reported(flow.table, None)
        assert world.flow.failures.current == ()
        flow.forget((shard.ref.step,))
        flow.add(shard)  # the write of a save ends that was handed over after the step was dropped
        await until(lambda: not flow.shards(), "the shard is gone from the table")
        assert world.flow.node.find(shard.ref) is None


@pytest.mark.fault("The coordinator is away while a pod ends")
async def test_a_shard_that_the_coordinator_does_not_know_keeps_the_pod_until_a_report_failed(
    tmp_path: Path,
) -> None:
    async with reporting(tmp_path) as world:
        flow = world.flow.flow
        world.coordinator.away = True
        assert flow.stuck
        record = world.flow.node.write_shard(shard_header(1000), BytesSource(bytes(1000)))
        flow.add(own_shard(record))
        await world.flow.until_idle()
        assert not flow.is_known
        assert not flow.stuck
        world.reporter.changed()
        await until(lambda: flow.stuck, "the report has failed")
