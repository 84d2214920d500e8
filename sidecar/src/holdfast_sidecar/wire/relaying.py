"""Send the reports of this worker's group to the coordinator, and pass its plan on to the group (ADR 0016).

Nothing is acknowledged here: a worker receives the coordinator's reply to its report, or an error. What a
relay keeps is state that it gets again: the newest plan, and reports that wait for the request before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast_core.errors import RefusedError, UnavailableError
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import Ok, Plan, Refusal, WorkerReport, WorkerReports
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.wire.client import Peers

_MOST_SHARDS = 16384
"""Shards from which on a request takes no further report. They have a kilobyte each at most."""


class PlanBoard:
    """The newest plan of a round, for which workers wait."""

    def __init__(self, round_: RestartRound) -> None:
        self.plan = Plan(round_)
        self._changed = asyncio.Event()
        self._known: dict[Worker, tuple[str, int]] = {}
        """The plan that each worker has named as its last one."""
        self._closed = False

    def publish(self, plan: Plan) -> None:
        """Replace the plan, unless the same process has made a newer one."""
        if is_newer(plan, self.plan.coordinator, self.plan.version):
            self.plan = plan
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def newer(
        self, worker: Worker, coordinator: str, since: int, timeout_seconds: float
    ) -> Plan:
        """Return the plan when it is newer than the one that a worker has, or after the time-out.

        Args:
            worker: The worker, which has received and passed on that one.
            coordinator: `Plan.coordinator` of that one.
            since: `Plan.version` of that one.
            timeout_seconds: The time-out.
        """
        self._known[worker] = coordinator, since
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self._closed and not is_newer(self.plan, coordinator, since):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.plan

    def is_known_to(self, workers: Iterable[Worker]) -> bool:
        """Return whether all these workers have the present plan."""
        present = self.plan.coordinator, self.plan.version
        return all(self._known.get(worker) == present for worker in workers)

    def close(self) -> None:
        """End all waits."""
        self._closed = True
        self._changed.set()


def is_newer(plan: Plan, coordinator: str, version: int) -> bool:
    """Return whether a plan is newer than one of this process and version. One of another process is."""
    if plan.coordinator in ("", coordinator):
        return plan.coordinator != "" and plan.version > version
    return True


@dataclass(slots=True)
class _NextRequest:
    """Reports that go in one request."""

    round: RestartRound
    reports: dict[Worker, WorkerReport] = field(default_factory=dict)
    """The newest report of each worker."""
    reply: asyncio.Task[Ok] | None = None

    @property
    def shards(self) -> int:
        return sum(len(report.shards) for report in self.reports.values())


class Relaying:
    """Sender of the reports of this worker's group. Those that arrive during a request go together."""

    def __init__(self, current: CurrentRound, peers: Peers) -> None:
        self._current = current
        self._peers = peers
        self._open: _NextRequest | None = None
        """The batch that waits for the request before it."""
        self._sending = asyncio.Lock()
        self._round: RestartRound | None = None

    async def report(self, message: WorkerReports) -> Ok:
        """Send reports to the coordinator with others, and return its reply.

        Raises:
            RefusedError: The coordinator refuses them. BUSY if it cannot be reached.
            StaleRoundError: The round is over.
        """
        if message.round != self._round:
            # A request to a lost pod that is still under way must not hold up the reports of the next round.
            self._round, self._open, self._sending = message.round, None, asyncio.Lock()
        batch = self._open
        if batch is None or batch.shards >= _MOST_SHARDS:
            batch = self._open = _NextRequest(message.round)
            batch.reply = asyncio.create_task(self._send(batch, self._sending))
            batch.reply.add_done_callback(lambda task: task.cancelled() or task.exception())
        batch.reports.update((report.worker, report) for report in message.reports)
        assert batch.reply is not None
        return await asyncio.shield(batch.reply)

    async def _send(self, batch: _NextRequest, sending: asyncio.Lock) -> Ok:
        async with sending:
            if self._open is batch:
                self._open = None
            accepted = self._current().accepted
            if accepted is None:
                raise RefusedError(Refusal.SEALED, "the relay waits for its ROUND")
            message = WorkerReports(batch.round, tuple(batch.reports.values()))
            try:
                return await self._peers.call(accepted.coordinator, message, Ok)
            except UnavailableError as error:
                raise RefusedError(Refusal.BUSY, str(error)) from error
