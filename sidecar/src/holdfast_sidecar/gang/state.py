"""State of this pod's own ranks and launcher: what they report, what they are notified of, and the reports.

Ranks and launcher report their state. The starter bases its decisions on it, and the reporter sends it to the
coordinator, with the saves of the ranks. A report is sent when the state changes, with a minimum interval
that bundles changes. It is also sent periodically without a change, to detect a coordinator that restarted
and has no reports yet.

Ranks are notified of levels of their saves and of requests of the operator. A rank that reconnects is sent
the newest notices again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast_core import logs
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Level, Rank, RestartRound, Step, TierName, Worker, worker_of
from holdfast_core.messages.codec import MAX_VALUED_STEPS
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    DeadRank,
    LauncherState,
    Ok,
    Plan,
    Progress,
    RankSaves,
    RankStack,
    StepOutcome,
    WorkerReport,
    WorkerReports,
)
from holdfast_core.save.staging import Stager
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import RoundState, urgent_part, waiting_saves
from holdfast_sidecar.base.telemetry import Failures, RankGauges
from holdfast_sidecar.restore.rehydrate import Rehydrator
from holdfast_sidecar.save.flow import Flow
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.intake import LocalConnection, LocalConnections

KILLED = -9
_VALUED_STEPS = 64
"""Steps of which the metrics are kept. A copy from a GPU ends before so many later steps."""


class SavedMetrics:
    """What the script of rank 0 had reported when it saved each of its newest steps."""

    def __init__(self) -> None:
        self._reported: dict[Step, dict[str, float]] = {}
        self._saved: dict[Step, dict[str, float]] = {}

    def reported(self, step: Step, metrics: dict[str, float]) -> None:
        """Record the metrics that rank 0 sent with a finished step."""
        self._reported[step] = metrics
        _shorten(self._reported, _VALUED_STEPS)

    def staged(self, step: Step) -> None:
        """Record that rank 0 has handed a step over.

        A step on a GPU may be handed over after later ones were finished.
        """
        before = [s for s in self._reported if s <= step]
        if before and self._reported[max(before)]:
            self._saved[step] = self._reported[max(before)]
            _shorten(self._saved, MAX_VALUED_STEPS)

    @property
    def newest(self) -> dict[Step, dict[str, float]]:
        return dict(sorted(self._saved.items()))


class LocalGang:
    """Record of the pod's ranks. A seal resets all but `running_round` and `ends`."""

    def __init__(self, procs_per_worker: int) -> None:
        self._procs_per_worker = procs_per_worker
        self.running_round: RestartRound | None = None
        """Round whose ranks the launcher runs now, if any."""
        self.barrier_open = False
        """Whether the launcher runs, or has run, the ranks of this round. The starter sets and resets it."""
        self.progress: dict[Rank, Progress] = {}
        """The newest progress of each rank, without metrics."""
        self.metrics: dict[Rank, dict[str, float]] = {}
        """What each rank's script has reported with its newest step."""
        self.saved = SavedMetrics()
        """What rank 0 had reported when it saved its newest steps."""
        self.dead: dict[Rank, DeadRank] = {}
        self.returned: set[Rank] = set()
        """Ranks that have exited with code 0."""
        self.finished = False
        """`LauncherState.finished` of this round."""
        self.done = False
        """Whether the pod is `finished` and all messages of its ranks were received."""
        self.ends = False
        """Whether the preStop hook of the pod has been called. No seal resets this."""
        self.waits_for_store: bool | None = None
        """`Ok.waits_for_store` of the reply to a report that the pod ends. None while there is none, and
        while the coordinator does not reply."""
        self.stacks_wanted = ""
        """The token by which the coordinator requests the stacks of the ranks. "": it does not."""
        self.stacks_token = ""
        """The request of the coordinator that `stacks` is the reply to."""
        self.stacks: tuple[RankStack, ...] = ()

    def reset(self) -> None:
        self.progress = {}
        self.metrics = {}
        self.saved = SavedMetrics()
        self.dead = {}
        self.returned = set()
        self.finished = self.done = False
        self.waits_for_store = None
        self.stacks_wanted, self.stacks_token, self.stacks = "", "", ()

    @property
    def may_save(self) -> bool:
        """Whether a rank of this pod can hand over another save."""
        return self.running_round is not None and not self.done

    @property
    def leaves(self) -> bool:
        """Whether the pod is ending and its ranks have stopped, without having returned for good."""
        return self.ends and not self.done and not self.may_save

    def replied(self, report: WorkerReport, reply: Ok) -> None:
        """Record the coordinator's reply to a report of the current round."""
        if report.ends:
            self.waits_for_store = reply.waits_for_store

    def trains(self, round_: RestartRound, ranks: range) -> bool:
        """Return whether all these ranks run in this round and have finished a step of it."""
        running = self.running_round == round_ and not self.dead and not self.returned
        return running and set(self.progress) == set(ranks)

    def progressed(self, message: Progress) -> None:
        """Record a rank's newest progress. Its step never decreases."""
        before = self.progress.get(message.rank)
        if before is not None and before.step > message.step:
            self.progress[message.rank] = replace(message, step=before.step, metrics={})
            return
        self.metrics[message.rank] = message.metrics
        if message.rank == 0:
            self.saved.reported(message.step, message.metrics)
        self.progress[message.rank] = replace(message, metrics={})

    def reported(self, message: LauncherState, own_ranks: range) -> None:
        """Record what the launcher has reported of the ranks of this round."""
        self.returned.update(rank for rank in message.returned if rank in own_ranks)
        for death in message.dead:
            if death.rank in own_ranks:
                worker = worker_of(death.rank, self._procs_per_worker)
                self.dead[death.rank] = replace(death, worker=worker, message=death.message[:2048])
        self.finished = message.finished
        self.stacks_token = message.stacks_token
        self.stacks = tuple(stack for stack in message.stacks if stack.rank in own_ranks)

    def launcher_lost(self, ranks: Iterable[Rank], why: str) -> None:
        """Record the ranks as killed that had not returned when their launcher ended.

        Ranks that had returned saved and stopped, because their pod leaves.
        """
        self.lost((rank for rank in ranks if rank not in self.returned), why)

    def lost(self, ranks: Iterable[Rank], why: str) -> None:
        """Record ranks as killed that ended together with the launcher, without reporting an exit code."""
        for rank in ranks:
            worker = worker_of(rank, self._procs_per_worker)
            self.dead.setdefault(rank, DeadRank(rank, worker, KILLED, why))


_STEPS_KEPT = 32


class RankNotices:
    """Notices of the current round to the ranks of this pod."""

    def __init__(self, current: Callable[[], RoundState], connections: LocalConnections) -> None:
        self._current = current
        self._connections = connections
        self._requested: Plan | None = None
        """What rank 0 is requested to do in this round."""
        self._outcomes: dict[Step, StepOutcome] = {}
        """The newest level of each of the newest steps of this round, or that the step was dropped."""

    def level(self, reached: StepOutcome) -> None:
        """Notify the ranks of a step's level, or why it does not reach one."""
        self._outcomes[reached.step] = reached
        _shorten(self._outcomes, _STEPS_KEPT)
        for connection in self._ranks():
            self._push(connection, reached)

    def dropped(self, steps: tuple[Step, ...]) -> None:
        """Notify the ranks of pruned steps that have not reached level local. They never will."""
        text = "a newer step replaced it before it was on the node tiers"
        for step in steps:
            known = self._outcomes.get(step)
            if known is None or known.failed:  # a rank may have saved it again
                round_ = self._current().round
                self.level(StepOutcome(step, round_, Level.LOCAL, OVERTAKEN, text))

    def request(self, wanted: Plan) -> None:
        """Send what a plan requests to rank 0. It is kept for a rank 0 that connects later.

        The first plan of a coordinator that has restarted requests nothing and takes nothing back.
        """
        if wanted not in (self._requested, Plan(wanted.round)):
            self._requested = wanted
            self._connections.push_rank(Rank(0), wanted)

    def repeat(self, connection: LocalConnection) -> None:
        """Send the newest notices to a rank that has connected again."""
        for outcome in self._outcomes.values():
            self._push(connection, outcome)
        if connection.rank == 0 and self._requested is not None:
            connection.push(self._requested)

    def sealed(self) -> None:
        """Discard what belongs to the old round."""
        self._requested = None
        self._outcomes = {}

    def _push(self, connection: LocalConnection, outcome: StepOutcome) -> None:
        """Push an outcome, and for a committed step of a job without a store that it is never persisted.

        A wait for that level would otherwise never end.
        """
        connection.push(outcome)
        accepted = self._current().accepted
        if accepted is not None and not (accepted.policy.has_object_tier or outcome.failed):
            text = "the job has no object store; set spec.checkpoint.object"
            step, round_ = outcome.step, outcome.round
            connection.push(StepOutcome(step, round_, Level.PERSISTED, NO_OBJECT_TIER, text))

    def _ranks(self) -> list[LocalConnection]:
        ranks = self._connections.ranks
        return [ranks[Rank(r)] for r in self._current().own_ranks if Rank(r) in ranks]


def _shorten(by_step: dict[Step, Any], longest: int) -> None:
    while len(by_step) > longest:
        del by_step[min(by_step)]


_REPORTS_PER_SECOND = 1000
"""Reports without an urgent change that a coordinator receives in a second, at most."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The components whose state a report contains."""

    gang: LocalGang
    flow: Flow
    stager: Stager
    rehydrator: Rehydrator
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
        progress=tuple(
            p if rank == 0 else replace(p, interval=None)
            for rank, p in sorted(gang.progress.items())
        ),
        dead=tuple(gang.dead[r] for r in sorted(gang.dead)),
        failures=sources.failures.current,
        rehydrate_seconds=rehydrator.seconds,
        barrier_open=gang.barrier_open,
        cannot_restore=rehydrator.failures.text,
        restore_may_succeed=rehydrator.failures.may_pass,
        done=gang.done,
        idle=sources.stager.idle and sources.flow.idle,
        ends=gang.ends,
        leaves=gang.leaves,
        saves=tuple(_saves(state, sources)),
        step_metrics=gang.saved.newest,
        stacks_token=gang.stacks_token,
        stacks=gang.stacks,
        shards=sources.flow.table,
        lost=tuple(sorted(sources.flow.lost)),
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
        take_stacks: Callable[[], object],
    ) -> None:
        """Create the task; `start` begins.

        Args:
            pod, sources, peers: What is reported, and how.
            take_stacks: Called when `LocalGang.stacks_wanted` has changed.
        """
        self._pod = pod
        self._current = pod.current
        self._sources = sources
        self._peers = peers
        self._take_stacks = take_stacks
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
        if sent is None or sent[0] != state.coordinator or _awaited(now) != _awaited(sent[1]):
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
            if state.accepted is None or self._sources.flow.resuming:
                continue
            coordinator = state.accepted.coordinator
            report = compose(state, self._sources)
            if (coordinator, report) == self._last and not beat:
                continue
            self._urgent.clear()
            self._sent = coordinator, report
            try:
                message = await self._message(report)
                reports = WorkerReports(report.round, (message,))
                reply = await self._peers.call(coordinator, reports, Ok)
            except HoldfastError as error:
                changes.warning("report", str(error), round=state.round)
                self._sources.gang.waits_for_store = None
                self._sources.flow.report_failed()
                self._changed.set()
                await _wait(self._urgent, min(backoff.next_seconds(), 2.0))
                continue
            backoff.reset()
            changes.healthy("report")
            now = self._current()
            if (now.round, now.coordinator) == (state.round, coordinator):
                if report.worker in reply.wants_shards:
                    self._sources.flow.coordinator_changed()
                    self._changed.set()
                    continue
                own = (r for r in reply.refused if r.worker == report.worker)
                self._sources.flow.reported(report.shards, next(own, None))
            self._last = coordinator, report
            self._sources.gang.replied(report, reply)
            gang = self._sources.gang
            if reply.round == now.round and reply.stacks_token != gang.stacks_wanted:
                gang.stacks_wanted = reply.stacks_token
                self._take_stacks()
            await _wait(self._urgent, self._interval_seconds())

    async def _message(self, report: WorkerReport) -> WorkerReport:
        """Return the report as it is sent.

        Shards and layouts that the coordinator has would cost it more than the rest of the report.
        """
        flow = self._sources.flow
        if flow.known is not None:
            described = {(s.step, s.shard) for s in flow.known}
            shards = tuple(
                replace(s, layout=None) if (s.step, s.shard) in described else s
                for s in report.shards
                if s not in flow.known
            )
            return replace(report, shards=shards, has_all_shards=False)
        return replace(report, manifests=await flow.manifests())


def _awaited(report: WorkerReport) -> tuple[object, ...]:
    """Return the part of a report whose changes are sent at once, because other workers may wait for it."""
    return urgent_part(report), waiting_saves(report), report.shards, report.lost


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, for at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
