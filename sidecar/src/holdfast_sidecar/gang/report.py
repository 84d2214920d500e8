"""Report this worker's part of the gang's state to the coordinator.

A report is sent when the state changes, with a minimum interval that bundles changes. It is also sent
periodically without a change, to detect a coordinator that restarted and has no reports yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Rank, TierName, Worker
from holdfast_core.messages.schema import Ok, RankSaves, WorkerReport
from holdfast_core.save.staging import Stager
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import RankGauges
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.restore.rehydrate import Rehydrator
from holdfast_sidecar.save.flow import Flow
from holdfast_sidecar.wire.client import Peers

_REPORTS_PER_SECOND = 1000
"""Reports without an urgent change that a coordinator receives in a second, at most."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The components whose state a report contains."""

    gang: LocalGang
    flow: Flow
    stager: Stager
    rehydrator: Rehydrator
    starter: Starter
    failures: Failures


def compose(state: RoundState, sources: Sources) -> WorkerReport:
    """Return the present report of this worker.

    Args:
        state: The round that the report is of.
        sources: The components to read.
    """
    gang, rehydrator = sources.gang, sources.rehydrator
    restored = rehydrator.restored
    return WorkerReport(
        round=state.round,
        worker=state.worker,
        progress=tuple(gang.progress[r] for r in sorted(gang.progress)),
        dead=tuple(gang.dead[r] for r in sorted(gang.dead)),
        failures=sources.failures.current,
        rehydrate_seconds=rehydrator.seconds,
        barrier_open=sources.starter.barrier_open,
        cannot_restore=rehydrator.cannot_restore,
        restore_may_succeed=rehydrator.restore_may_succeed,
        done=gang.done,
        idle=sources.stager.idle and sources.flow.idle,
        ends=gang.ends,
        leaves=gang.leaves,
        saves_skipped=gang.saves_skipped,
        saves=tuple(_saves(state, sources)),
        stacks_token=gang.stacks_token,
        stacks=gang.stacks,
        shards=sources.flow.table,
        has_plan=sources.flow.has_plan,
        interval=gang.intervals.get(Rank(0)),
        accepted=state.acceptance,
        restored_from=() if restored is None else tuple(restored.sources.values()),
    )


def _saves(state: RoundState, sources: Sources) -> Iterator[RankSaves]:
    """Yield, for each rank that has saved in this round, its newest save and those under way."""
    for rank in map(Rank, state.own_ranks):
        unlisted = sources.flow.unlisted(rank)
        newest = sources.stager.newest(rank)
        if newest is None:  # the process that staged them has ended since
            newest = max(unlisted, default=None)
        if newest is not None:
            under_way = {*sources.stager.under_way(rank), *unlisted}
            stager = sources.stager
            yield RankSaves(
                rank,
                newest,
                tuple(sorted(under_way)),
                stager.waiting(rank),
                writes=stager.writes(rank),
            )


def gauges(state: RoundState, sources: Sources) -> tuple[RankGauges, ...]:
    """Return what the page of the metrics shows of each own rank."""
    return tuple(_gauges(Rank(r), state, sources) for r in state.own_ranks)


def _gauges(rank: Rank, state: RoundState, sources: Sources) -> RankGauges:
    targets = set(state.copy_targets())
    own = [s for s in sources.flow.shards() if s.ref.rank == rank]
    restored = sources.rehydrator.restored
    held = [s.ref.step for s in own]
    if restored is not None and rank in restored.refs:
        held.append(restored.refs[rank].step)
    steps = {
        TierName.MEMORY: [
            *(r.header.step for r in sources.stager.memory.values() if r.header.rank == rank),
            *sources.stager.waiting(rank),
        ],
        TierName.NODE: held,
        TierName.PEER: [s.ref.step for s in own if targets and targets <= s.copied],
        TierName.OBJECT: [s.ref.step for s in own if s.uploaded],
    }
    progress = sources.gang.progress.get(rank)
    return RankGauges(
        rank,
        step=None if progress is None else progress.step,
        reported=sources.gang.metrics.get(rank, {}),
        newest={tier: max(found) for tier, found in steps.items() if found},
        restored_from=_source(rank, sources),
    )


def _source(rank: Rank, sources: Sources) -> TierName | None:
    restored = sources.rehydrator.restored
    return None if restored is None else restored.sources.get(rank)


class Reporter:
    """Background task that sends reports to the coordinator of the current round."""

    def __init__(
        self,
        pod: Pod,
        sources: Sources,
        peers: Peers,
    ) -> None:
        self._pod = pod
        self._current = pod.current
        self._sources = sources
        self._peers = peers
        self._tasks = Tasks()
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._last: tuple[Worker, WorkerReport] | None = None
        """The last report that a coordinator has acknowledged, and the coordinator."""
        self._sent: tuple[Worker, WorkerReport] | None = None
        """The last report that was sent, acknowledged or not, and the coordinator."""

    def start(self) -> None:
        self._tasks.spawn(self._run(), "report")

    async def close(self) -> None:
        await self._tasks.cancel()

    def changed(self) -> None:
        """Send a report soon, and at once if others may wait for what has changed."""
        self._changed.set()
        state, sent = self._current(), self._sent
        now = compose(state, self._sources)
        coordinator = None if state.accepted is None else state.accepted.coordinator
        if sent is None or sent[0] != coordinator or _awaited(now) != _awaited(sent[1]):
            self._urgent.set()

    def _interval_seconds(self) -> float:
        """Return the minimum time between two reports.

        It grows with the gang, so that the reports of all workers take a bounded share of the coordinator's
        processor.
        """
        accepted = self._current().accepted
        workers = 0 if accepted is None else accepted.workers
        return max(self._pod.settings.report_interval_seconds, workers / _REPORTS_PER_SECOND)

    async def _run(self) -> None:
        settings = self._pod.settings
        backoff = self._pod.backoff()
        changes = logs.Changed()
        while True:
            await _wait(self._changed, settings.heartbeat_seconds)
            beat = not self._changed.is_set()
            self._changed.clear()
            state = self._current()
            if state.accepted is None:
                continue
            coordinator = state.accepted.coordinator
            report = compose(state, self._sources)
            if (coordinator, report) == self._last and not beat:
                continue
            self._urgent.clear()
            self._sent = coordinator, report
            try:
                message = await self._message(report)
                reply = await self._peers.call(coordinator, message, Ok)
            except HoldfastError as error:
                changes.log("report", str(error), round=state.round)
                self._sources.gang.waits_for_store = None
                self._sources.flow.report_failed()
                self._changed.set()
                await _wait(self._urgent, min(backoff.next_seconds(), 2.0))
                continue
            backoff.reset()
            changes.healthy("report")
            now = self._current()
            if now.accepted is not None and (now.round, now.accepted.coordinator) == (
                state.round,
                coordinator,
            ):
                if reply.wants_shards:
                    self._sources.flow.coordinator_changed()
                    self._changed.set()
                    continue
                self._sources.flow.reported(report.shards, reply.refused)
            self._last = coordinator, report
            self._sources.starter.take_stacks(reply.round, reply.stacks_token)
            self._sources.gang.replied(report, reply)
            await _wait(self._urgent, self._interval_seconds())

    async def _message(self, report: WorkerReport) -> WorkerReport:
        """Return the report as it is sent.

        Shards that the coordinator has would cost it more than the rest of the report.
        """
        flow = self._sources.flow
        if flow.known is not None:
            shards = tuple(s for s in report.shards if s not in flow.known)
            return replace(report, shards=shards, has_all_shards=False)
        return replace(report, manifests=await flow.manifests())


def _awaited(report: WorkerReport) -> tuple[object, ...]:
    """Return the part of a report whose changes are sent at once, because other workers may wait for it."""
    return report.urgent, report.waiting, report.shards


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, for at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
