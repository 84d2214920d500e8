"""The coordinator of a round, which decides that a step is committed and at which level.

It takes the reports of all workers and answers the operator. commit.py has the way of a step to its levels
and the retention, uploads.py the way to the store, and watchdog.py what watches over the gang.

The operator decides about rounds. A new coordinator rebuilds this state from one report of each worker, which
lists all of its shards and the manifests on its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace

from holdfast_core import logs
from holdfast_core.errors import HoldfastError, NotFoundError, RefusedError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, Level, Rank, Step, TierName, Worker, ranks_of
from holdfast_core.messages.schema import (
    CoordinatorState,
    Failure,
    GangRequest,
    Interval,
    Ok,
    Plan,
    Prune,
    Refusal,
    RestorePoint,
    Round,
    Straggler,
    WorkerReport,
    WorkerReports,
)
from holdfast_core.tasks import Signal, Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.commit import Commits, Retention, RoundParts
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry
from holdfast_sidecar.coordinator.plan import plan, shard_infos
from holdfast_sidecar.coordinator.uploads import GangUploads
from holdfast_sidecar.coordinator.watchdog import CommitAlarm, HangWatch, StragglerWatch
from holdfast_sidecar.upkeep.prune import Leftovers
from holdfast_sidecar.wire.following import Plans
from holdfast_sidecar.wire.server import Versioned
from holdfast_sidecar.wire.verbs import END, STOP

SILENT_SECONDS = 20.0
"""Time without a report after which a worker counts as silent: pods that end no longer wait for its upload,
and the operator calls it itself. It is several times the interval of reports."""
_SHOWN_STEPS = 16
_LOOK_SECONDS = 1.0
"""Interval in which the coordinator looks whether the gang hangs."""
_COMPARED_PER_SECOND = 4096
"""Ranks that the search for stragglers compares in a second, at most."""


class GangEnd:
    """What the coordinator does when ranks or pods end."""

    def __init__(self, parts: RoundParts, commits: Commits, versioned: Versioned) -> None:
        self._parts = parts
        self._contract = parts.pod.settings.contract
        self._clock = parts.pod.clock
        self._store = parts.tiers.store
        self._pools = parts.tiers.pools
        self._ledger = parts.ledger
        self._gathered = parts.gathered
        self._commits = commits
        self._versioned = versioned
        self._done_at: float | None = None
        self._finished_version: int | None = None
        self._left: tuple[RestorePoint | None, int] | None = None
        """The newest persisted step of a gang with a leaving pod, and the version that reports it."""
        self._gave_up = False
        self._is_over = False
        """Whether the operator has ended the job. Its pods stay until the newest step is persisted."""

    @property
    def finished(self) -> bool:
        """Whether the newest step has every level that it is to reach after all ranks have returned 0."""
        return self._finished_version is not None

    def end_job(self) -> None:
        """Bring the newest step into the store, because the operator has ended the job."""
        self._is_over = True
        self._versioned.tick()

    @property
    def may_end(self) -> bool:
        """Whether this pod may end: it is idle, and the operator has received what no other pod can tell it.

        A restore from the object store alone needs the record of the last persisted step.
        """
        if not self._only_store_stays:
            return self._commits.idle
        if self._left is None or not self._commits.idle:
            return False
        reported, version = self._left
        return reported == self._parts.uploads.last and self._versioned.acknowledged(version)

    async def run(self) -> None:
        """Finish the job after all ranks have returned 0.

        The newest step is brought to every level that it is to reach, then the state reports `finished`.
        `release` releases the pods once the operator has acknowledged that state.
        """
        while self._finished_version is None:
            await self._versioned.wait_tick(at_most_seconds=5.0)
            if self._is_over:
                await self._adopt_restore_point()
            if self._is_over or self._only_store_stays:
                self._persist_last_step()
            if not self._gathered.done:
                continue
            if self._done_at is None or self._parts.uploads.is_held:
                # A quota is no failure of the store: the pods keep the step until there is room.
                self._done_at = self._clock.monotonic()
            self._parts.uploads.finish(self._newest_that_stays())
            waited = self._clock.monotonic() - self._done_at
            if waited > self._parts.pod.settings.finish_give_up_seconds and not (
                self._gave_up or self._is_over
            ):
                self._gave_up = True
                self._parts.uploads.give_up(waited)
            if self._settled():
                self._finished_version = self._versioned.bump(urgent=True)
                logs.info("finished", round=self._parts.message.round)

    @property
    def _only_store_stays(self) -> bool:
        """Whether a pod leaves whose shards only the object store can keep.

        Either no peer has copies, or all peers that have copies are ending, too, or the gang may continue
        with fewer workers, which cannot restore from peers.
        """
        return self._store is not None and self._gathered.leaves and not self._copies_stay

    @property
    def _copies_stay(self) -> bool:
        """Whether copies of the shards of each pod that ends stay, from which the next round can restore."""
        ending = self._gathered.ending
        if ending and self._parts.message.policy.shrinks:
            return False
        kept = all(self._gathered.stays(self._parts.targets.get(worker, ())) for worker in ending)
        return kept and (self._ledger.expects_copies or not ending)

    @property
    def waits_for_store(self) -> bool:
        """Whether no pod may end before the newest step is persisted.

        A step is persisted only if all workers upload their shards. So it is the same for all workers, and
        false once one of them is silent. It is also false while a quota is reached: nothing would be uploaded
        in the whole grace period.
        """
        if self._store is None or self._parts.uploads.waits_for_room or self._copies_stay:
            return False
        # This looks at all workers, so it comes last: every report of each worker asks for it.
        return self._gathered.all_reported_since(self._clock.monotonic() - SILENT_SECONDS)

    def _persist_last_step(self) -> None:
        """Persist the step at which the ranks have stopped, then report it to the operator immediately."""
        self._parts.uploads.finish(self._newest_that_stays())
        last = self._parts.uploads.last
        # The reports of other workers may still have to say that they have saved a newer step.
        if self._commits.idle and (self._left is None or self._left[0] != last):
            self._left = last, self._versioned.bump(urgent=True)
            logs.info("the last step is persisted: a pod leaves", round=self._parts.message.round)

    async def _adopt_restore_point(self) -> None:
        """Enter the restore point as a local step, if this round has none and the store lacks it.

        The members have its shards, from which the ranks were to restore.
        """
        point = self._parts.message.restore_point.own_checkpoint
        comes = self._commits.choice().pending or self._ledger.pending
        has_saved = comes or self._ledger.newest(Level.LOCAL) is not None
        if point is None or has_saved or self._parts.uploads.has(point):
            return
        try:
            found = await self._pools.read.run(
                self._parts.tiers.node.get_manifest,
                self._contract.job_uid,
                point,
            )
            shards = await self._pools.read.run(shard_infos, found, self._contract.job_uid, point)
        except HoldfastError as error:
            self._parts.failures.note(
                "manifest of the restore point", TierName.NODE, error, step=point.step
            )
            return
        if len(shards) == self._ledger.world_size:  # else the store has it: other ranks saved it
            self._ledger.adopt(point, found, digest_of(found), shards)

    def _newest_that_stays(self) -> StepEntry | None:
        """Return the newest local step, which the end of the job uploads.

        None while a step that waits in slots, or waits for its manifest, can still become local, because that
        one is uploaded then.
        """
        comes = any(not self._ledger.steps[step].local for step in self._ledger.pending)
        return None if comes or self._commits.choice().pending else self._ledger.newest(Level.LOCAL)

    def _settled(self) -> bool:
        return self._gave_up or (self._gathered.idle and self._commits.idle)

    def release(self) -> None:
        if self._finished_version is not None and self._versioned.acknowledged(
            self._finished_version
        ):
            self._parts.plans.release()


class Coordinator:
    """Coordinator of one round. It exists while the current ROUND names this sidecar as coordinator."""

    def __init__(
        self,
        pod: Pod,
        message: Round,
        tiers: Tiers,
        failures: Failures,
    ) -> None:
        settings, clock = pod.settings, pod.clock
        contract = settings.contract
        workers = tuple(Worker(w) for w in range(message.workers))
        world_size = message.workers * contract.procs_per_worker
        self._ledger = Ledger(
            message.round,
            world_size,
            workers,
            first=frozenset(map(Rank, ranks_of(message.coordinator, contract.procs_per_worker))),
            expects_copies=_expects_copies(message),
        )
        self._gathered = Gathered(frozenset(workers), world_size, clock.monotonic())
        self._versioned = Versioned()
        self._tasks = Tasks()
        changed = Signal[[]]()
        plans = Plans(
            settings,
            clock,
            message,
            lambda own, released: plan(self._ledger, released=released, is_first=own),
        )
        self._uploads = GangUploads(
            contract,
            message,
            tiers.store,
            ledger=self._ledger,
            versioned=self._versioned,
            pools=tiers.pools,
            failures=failures,
            clock=clock,
            on_change=changed,
        )
        self._parts = RoundParts(
            pod,
            tiers,
            failures,
            message,
            message.copies,
            self._ledger,
            self._gathered,
            plans,
            self._uploads,
            changed,
        )
        self._retention = Retention(self._parts)
        self._commits = Commits(self._parts, self._retention)
        self._end = GangEnd(self._parts, self._commits, self._versioned)
        changed.subscribe(lambda: self._versioned.bump(urgent=True))
        changed.subscribe(plans.wake)
        self._alarm = CommitAlarm(settings, self._ledger, self._gathered, clock, changed)
        self._hangs = HangWatch(self._gathered, secrets.token_hex(8))
        self._stragglers = StragglerWatch(self._gathered)
        self._leftovers = Leftovers(
            contract,
            message.round,
            tiers.store,
            pools=tiers.pools,
            clock=clock,
            uploading=self._uploading,
        )

    # ------------------------------------------------------------------ life cycle

    def start(self) -> None:
        self._parts.plans.wake()
        self._tasks.spawn(self._uploads.run(), "uploads")
        self._tasks.spawn(self._uploads.compare(), "comparison with the store")
        self._tasks.spawn(self._leftovers.run(), "leftovers")
        self._tasks.spawn(self._retention.make_room(), "room")
        self._tasks.spawn(self._end.run(), "finish")
        self._tasks.spawn(self._look_for_hangs(), "hangs")
        self._tasks.spawn(self._look_for_stragglers(), "stragglers")

    def update(self, message: Round) -> None:
        """Take over a higher version of the same ROUND."""
        complete = all(m.address for m in message.members)
        if complete and not all(m.address for m in self._parts.message.members):
            self._gathered.started = self._parts.pod.clock.monotonic()
        self._parts.message = message
        self._parts.targets = message.copies
        self._ledger.expects_copies = _expects_copies(message)
        self._uploads.policy(message)
        self._parts.changed()

    @property
    def idle(self) -> bool:
        """See Commits.idle."""
        return self._commits.idle

    @property
    def may_end(self) -> bool:
        """See GangEnd.may_end."""
        return self._end.may_end

    @property
    def dropped(self) -> int:
        """See Commits.dropped."""
        return self._commits.dropped

    async def close(self) -> None:
        await self._commits.close()
        await self._tasks.cancel()
        await self._parts.plans.close()
        self._versioned.close()

    # ------------------------------------------------------------------ messages of members

    def report(self, message: WorkerReports) -> Ok:
        """Take over the states of workers."""
        wants_shards: list[Worker] = []
        refused: list[Failure] = []
        for report in message.reports:
            found = self._take(report)
            if found is not None:
                refused.append(found)
            if report.worker not in self._gathered.has_all:
                wants_shards.append(report.worker)
        return Ok(
            message.round,
            tuple(wants_shards),
            tuple(refused),
            self._hangs.token,
            self._end.waits_for_store,
        )

    def _take(self, message: WorkerReport) -> Failure | None:
        """Take over a worker's state. Return the first of its shards that is not accepted."""
        before = self._gathered.reports.get(message.worker)
        if message.has_all_shards:
            self._gathered.has_all.add(message.worker)
        if message.worker not in self._gathered.has_all:
            # They mean something together with all shards only.
            message = replace(message, saves=())
        urgent = self._gathered.receive(message, self._parts.pod.clock.monotonic())
        listed = self._retention.take_manifests(message)
        refused = self._commits.take_shards(message)
        for step in message.lost:
            self._retention.lost(step)
        self._retention.look_for_lost(message.worker, everywhere=bool(listed))
        if before is None or before.saves != message.saves:
            self._commits.weigh_soon()
        self._alarm.look(self._parts.message.policy)
        self._parts.uploads.look(message.failures)
        self._retention.look(message.worker)
        if urgent or message != before:
            self._versioned.bump(urgent=urgent)
        else:
            self._versioned.tick()
        return refused

    async def plan(
        self, worker: Worker, coordinator: str, since: int, timeout_seconds: float
    ) -> Plan:
        """Return the plan when it is newer. See Plans.newer."""
        return await self._parts.plans.newer(worker, coordinator, since, timeout_seconds)

    def manifest(self, checkpoint: CheckpointId) -> bytes:
        """Return a manifest that was built. Raises NotFoundError."""
        entry = self._ledger.steps.get(checkpoint.step)
        if entry is None or entry.manifest is None or entry.checkpoint != checkpoint:
            raise NotFoundError(f"the coordinator has built no manifest of {checkpoint}")
        return entry.manifest

    def request(self, path: str, message: GangRequest) -> Ok:
        """Pass a save-now or stop request on to rank 0, or end the job: stop and persist.

        The same request with the same token has an effect only once. The first step that is committed above
        the ranks' present progress is persisted.
        """
        if path == END:
            self._end.end_job()
            path = STOP
        progress, base = self._gathered.progress, self._parts.message.restore_point.step
        known = (base, None if progress is None else progress.last)
        after = max((s for s in known if s is not None), default=Step(-1))
        if self._parts.plans.request(path, message, after):
            self._uploads.ask_after(after)
            self._versioned.tick()  # the operator repeats a request whose token it does not find
        return Ok(message.round)

    async def prune(self, message: Prune) -> Ok:
        """See Retention.prune."""
        return await self._retention.prune(message)

    def _uploading(self) -> frozenset[CheckpointId]:
        return frozenset(self._ledger.uploads.wanted)

    # ------------------------------------------------------------------ state for the operator

    async def state(
        self, since: int, timeout_seconds: float, quiet_seconds: float, *, acknowledges: bool
    ) -> CoordinatorState:
        """Return the state once its version is above `since`, or after the time-out.

        Args:
            quiet_seconds: Time for which the reply waits for urgent changes only. It has an effect for the
                operator only.
            acknowledges: The caller has durably recorded every version up to `since`.
        """
        if acknowledges:
            self._versioned.acknowledge(since)
            self._versioned.bundle_for(quiet_seconds)
            self._end.release()
        await self._versioned.wait_above(since, timeout_seconds)
        state = self._state()
        if acknowledges:
            self._versioned.delivered(state.version)
        return state

    def levels(self) -> dict[Level, Step | None]:
        """Return the newest step of this round that has reached each level."""
        newest = {level: self._ledger.newest(level) for level in Level}
        return {level: None if e is None else e.step for level, e in newest.items()}

    def _state(self) -> CoordinatorState:
        gathered = self._gathered
        return CoordinatorState(
            version=self._versioned.version,
            round=self._parts.message.round,
            committed=self._ledger.newest_committed(_SHOWN_STEPS),
            last_local=_point(self._ledger.newest(Level.LOCAL)),
            last_replicated=_point(self._ledger.newest(Level.REPLICATED)),
            last_persisted=self._uploads.last,
            last_persisted_bytes=self._uploads.last_bytes,
            last_persisted_metrics=self._metrics_of(self._uploads.last),
            newest_is_stored=self._uploads.is_stored,
            dead=gathered.dead,
            progress=gathered.progress,
            failures=self._all_failures(),
            rehydrate_seconds=gathered.rehydrate_seconds,
            rendezvous_seconds=gathered.rendezvous_seconds,
            first_step_seconds=gathered.first_step_seconds,
            running=gathered.running,
            cannot_restore=gathered.cannot_restore,
            restore_may_succeed=gathered.restore_may_succeed,
            finished=self._end.finished,
            saves_skipped=gathered.saves_skipped,
            hang=self._hangs.hang,
            late=self._hangs.late,
            accepted=gathered.accepted(self._parts.pod.clock.monotonic() - SILENT_SECONDS),
            save_tokens=self._parts.plans.save_tokens,
            stragglers=self._stragglers.found,
            restored_from=gathered.restored_from,
        )

    def _metrics_of(self, point: RestorePoint | None) -> dict[str, float]:
        found = None if point is None else point.own_checkpoint
        of_round = found is not None and found.round == self._parts.message.round
        return dict(self._gathered.metrics(found.step)) if found is not None and of_round else {}

    def _all_failures(self) -> tuple[Failure, ...]:
        """Return all failures in the order in which they are reported.

        Those of node tiers come first, because they explain missing commits; then the commit alarm.
        """
        own = (
            replace(f, worker=self._parts.message.coordinator) for f in self._parts.failures.current
        )
        found = tuple(dict.fromkeys((*self._gathered.failures, *own)))
        nodes = tuple(f for f in found if f.tier is TierName.NODE)
        return (*nodes, *self._alarm.failures, *(f for f in found if f not in nodes))

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The slowest ranks, by rank."""
        return self._stragglers.found

    @property
    def interval(self) -> Interval | None:
        """The interval between saves as rank 0 has reported it, if it is given as a time."""
        return self._gathered.interval

    @property
    def overdue_seconds(self) -> float:
        """See CommitAlarm.seconds."""
        return self._alarm.seconds

    async def _look_for_hangs(self) -> None:
        changes = logs.Changed()
        while True:
            await self._parts.pod.clock.sleep(_LOOK_SECONDS)
            changed = self._hangs.look(
                self._parts.message.policy, self._parts.pod.clock.monotonic()
            )
            if changed and self._hangs.hang:
                logs.warning("the gang hangs", detail=self._hangs.hang)
            if self._hangs.at_work:
                changes.warning("no step", self._hangs.at_work, round=self._parts.message.round)
            else:
                changes.healthy("no step")
            if changed:
                self._versioned.bump(urgent=True)

    async def _look_for_stragglers(self) -> None:
        # A look compares all ranks, so it is less frequent in a large gang.
        interval = max(_LOOK_SECONDS, self._gathered.world_size / _COMPARED_PER_SECOND)
        while True:
            await self._parts.pod.clock.sleep(interval)
            if self._stragglers.look(self._parts.message.policy):
                logs.info("the stragglers have changed", ranks=self._stragglers.ranks)
                self._versioned.bump(urgent=True)


def _expects_copies(message: Round) -> bool:
    """Return whether steps are copied to peers.

    If not (one worker, or `peer_copies` 0), local implies replicated.
    """
    return message.policy.peer_copies > 0 and bool(message.copies)


def _point(entry: StepEntry | None) -> RestorePoint | None:
    return None if entry is None else entry.point()


class CoordinatorRole:
    """Owner of the Coordinator, which exists while the current ROUND names this worker."""

    def __init__(self, pod: Pod, tiers: Tiers, failures: Failures) -> None:
        self._pod = pod
        self._tiers = tiers
        self._failures = failures
        self.coordinator: Coordinator | None = None
        """None while another worker coordinates, or while the sidecar is sealed."""
        self._changed = asyncio.Event()
        """Set when `coordinator` is replaced, and then replaced itself."""

    @property
    def may_end(self) -> bool:
        """Whether no step waits for this worker to raise its level, or to report it to the operator."""
        return self.coordinator is None or self.coordinator.may_end

    def begin(self, message: Round) -> None:
        """Coordinate the round if its ROUND names this worker. No Coordinator may exist."""
        if message.coordinator == self._pod.state.worker:
            self.coordinator = Coordinator(self._pod, message, self._tiers, self._failures)
            self.coordinator.start()
            self._wake()

    async def end(self) -> None:
        """Stop coordinating, because the round is sealed or another worker coordinates it."""
        if self.coordinator is not None:
            coordinator, self.coordinator = self.coordinator, None
            await coordinator.close()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def plan(
        self, worker: Worker, coordinator: str, since: int, timeout_seconds: float
    ) -> Plan:
        """See Coordinator.plan. A round that this worker coordinates, but has not begun yet, is waited for.

        Raises RefusedError (NOT_COORDINATOR).
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while self.coordinator is None and self._pod.state.is_coordinator:
                    await self._changed.wait()
        return await self.require().plan(worker, coordinator, since, timeout_seconds)

    def manifest(self, checkpoint: CheckpointId) -> bytes:
        """See Coordinator.manifest. Raises RefusedError (NOT_COORDINATOR)."""
        return self.require().manifest(checkpoint)

    def require(self) -> Coordinator:
        """Return the Coordinator. Raises RefusedError (NOT_COORDINATOR) if there is none."""
        if self.coordinator is None:
            raise RefusedError(
                Refusal.NOT_COORDINATOR,
                f"worker {self._pod.state.worker} is not the coordinator",
            )
        return self.coordinator
