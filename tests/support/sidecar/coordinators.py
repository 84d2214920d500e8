"""A coordinator of two workers whose reports the test sends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from tests.support.clock import ManualClock
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.ledgers import reported
from tests.support.sidecar.rounds import first_round
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.ids import Step, Worker
from holdfast_core.messages.schema import (
    Ok,
    Plan,
    Policy,
    ReportedShard,
    WorkerReport,
    WorkerReports,
)
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.coordinator.coordinator import Coordinator
from holdfast_sidecar.coordinator.plan import missing


class CoordinatorWorld:
    """The coordinator of the first round, or of another one. The context manager closes it."""

    def __init__(
        self,
        folder: Path,
        members: Any,
        policy: Policy | None = None,
        store: ObjectTier | None = None,
        **fields: Any,
    ) -> None:
        """Make the world. `members` receive what the coordinator sends, once it is started.

        `fields` replace fields of the ROUND message.
        """
        message = first_round().accepted
        assert message is not None
        message = replace(message, **fields)
        self._round = message.round
        self._reports: dict[int, WorkerReport] = {}
        self._members = members
        self._workers = message.workers
        self.clock = ManualClock()
        self.pools = Pools(disk=1, fetch=1, store=1)
        self.coordinator = Coordinator(
            Pod(
                Settings(contract_with(shared_dir=str(folder))),
                self.clock,
                CurrentRound(first_round()),
            ),
            message if policy is None else replace(message, policy=policy),
            Tiers(ScratchTier(), store, self.pools),
            Failures(lambda: None),
        )

    def shard(self, rank: int, step: int, *, replicated: bool = False) -> ReportedShard:
        """Return what a worker reports of its rank's shard of this round."""
        return reported(rank, Step(step), replicated=replicated, round_=self._round)

    def hold(
        self, step: int, *, ranks: tuple[int, ...] = (0, 1), replicated: bool = False
    ) -> list[Ok]:
        """Report that the shards of these ranks are durable. Each rank is a worker. Return the replies.

        Everything else in the reports of these workers stays as it was.
        """
        return [
            self.tell(rank, shards=(self.shard(rank, step, replicated=replicated),))
            for rank in ranks
        ]

    def tell(self, worker: int, **fields: Any) -> Ok:
        """Send a report of a worker, which replaces these fields of its last one. Return the reply."""
        self._reports[worker] = replace(self._report(worker), **fields)
        return self.coordinator.report(WorkerReports(self._round, (self._reports[worker],)))

    def _report(self, worker: int) -> WorkerReport:
        return self._reports.get(worker, WorkerReport(self._round, Worker(worker)))

    async def _follow(self, worker: Worker) -> None:
        """Give a member what is new in each plan. It stores the manifests that the plan names."""
        known = Plan(self._round)
        while True:
            plan = await self.coordinator.plan(worker, known.coordinator, known.version, 3600)
            found, known = missing(plan, known), plan
            if found is None:
                continue
            await self._members.call(worker, found, Ok)
            for checkpoint, _ in found.manifests:
                shard = replace(self.shard(worker, checkpoint.step), committed=True)
                report = replace(self._report(worker), shards=(shard,))
                self.coordinator.report(WorkerReports(self._round, (report,)))

    async def __aenter__(self) -> Self:
        workers = range(self._workers)
        self._following = [asyncio.create_task(self._follow(Worker(w))) for w in workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._following:
            task.cancel()
        await self.coordinator.close()
        self.pools.close()
