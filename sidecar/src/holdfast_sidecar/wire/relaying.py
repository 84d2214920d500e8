"""Send the reports of this worker's group to the coordinator (ADR 0016).

Nothing is acknowledged here: a worker receives the coordinator's reply to its report, or an error. What a
relay keeps is state that it gets again: reports that wait for the request before them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from holdfast_core.errors import RefusedError, UnavailableError
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import Ok, Refusal, WorkerReport, WorkerReports
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.wire.client import Peers

_MOST_SHARDS = 16384
"""Shards from which on a request takes no further report. They have a kilobyte each at most."""


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
