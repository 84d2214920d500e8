"""The coordinator of a round, which decides that a step is committed and at which level.

1. The workers report that the shard of every rank is durable: the coordinator builds the manifest. It is
   deterministic, so any coordinator of the round builds the same bytes.
2. The manifest is durable on the coordinator's own node tier, then on every member's: the step is at level
   local.
3. Every rank has all its copies: the step is at level replicated, and older steps may be pruned.
4. Every rank is uploaded: the manifest is put into the store if absent, and the step is at level
   persisted.

Where ranks save faster than a node writes, steps wait in slots. `choice.py` chooses which of them all ranks
write next, and which are dropped.

The operator decides about rounds. A new coordinator rebuilds this state from one report of each worker, which
lists all of its shards and the manifests on its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable
from dataclasses import replace

from holdfast_core.errors import HoldfastError, RefusedError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import (
    CheckpointId,
    Level,
    Rank,
    Step,
    TierName,
    Worker,
    ranks_of,
)
from holdfast_core.messages.schema import (
    CoordinatorState,
    Failure,
    GangRequest,
    Interval,
    Ok,
    Prune,
    PruneReply,
    Refusal,
    RefusedShard,
    RestorePoint,
    Round,
    Straggler,
    WorkerReport,
)
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.ledger import Conflict, Ledger, StepEntry
from holdfast_sidecar.coordinator.outbox import Outbox
from holdfast_sidecar.coordinator.plan import (
    SlotChoice,
    abandoned_steps,
    build_manifest,
    choose,
    lost_steps,
    shard_infos,
    steps_to_prune,
)
from holdfast_sidecar.coordinator.uploads import GangUploads
from holdfast_sidecar.coordinator.watchdog import CommitAlarm, HangWatch, StragglerWatch
from holdfast_sidecar.upkeep.prune import Leftovers, protected_steps, quarantined
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.server import Versioned
from holdfast_sidecar.wire.verbs import END, STOP

_SHOWN_STEPS = 16
_PRESSED_EVERY_SECONDS = 1.0
"""Interval of pruning while a node has no room. It gives the nodes time to delete what was pruned."""

_SILENT_SECONDS = 20.0
"""Time without a report after which a worker counts as silent: pods that end no longer wait for its upload,
and the operator calls it itself. It is several times the interval of reports."""
_LOOK_SECONDS = 1.0
"""Interval in which the coordinator looks whether the gang hangs."""
_COMPARED_PER_SECOND = 4096
"""Ranks that the search for stragglers compares in a second, at most."""
_WEIGH_AFTER_SECONDS = 0.01
"""Least time for which reports are gathered before the step to write is chosen again."""
_WEIGHED_PER_SECOND = 200_000
"""Ranks that choices look at in a second, at most: each choice looks at all."""


class Coordinator:
    """Coordinator of one round. It exists while the current ROUND names this sidecar as coordinator."""

    def __init__(
        self,
        pod: Pod,
        message: Round,
        tiers: Tiers,
        peers: Peers,
        failures: Failures,
    ) -> None:
        settings, clock = pod.settings, pod.clock
        node, store, pools = tiers.node, tiers.store, tiers.pools
        self._settings = settings
        self._contract = settings.contract
        self._message = message
        self._targets = message.targets()
        """The workers that receive copies of each worker's shards."""
        self._node = node
        self._store = store
        self._peers = peers
        self._pools = pools
        self._failures = failures
        self._clock = clock
        self._tasks = Tasks()
        workers = tuple(Worker(w) for w in range(message.workers))
        world_size = message.workers * self._contract.procs_per_worker
        self._ledger = Ledger(
            message.round, world_size, workers, expects_copies=_expects_copies(message)
        )
        self._gathered = Gathered(frozenset(workers), world_size, clock.monotonic())
        self._alarm = CommitAlarm(settings, self._ledger, self._gathered, clock, self._changed)
        self._older: set[CheckpointId] = set()
        """Checkpoints of older rounds on this round's lineage, and of this round where a member lacks its
        shard. Retention counts them besides the ledger's steps."""
        self._done_at: float | None = None
        self._finished_version: int | None = None
        self._left_version: int | None = None
        """Version that reports the last step of a gang with a leaving pod as persisted."""
        self._gave_up = False
        self._is_over = False
        """Whether the operator has ended the job. Its pods stay until the newest step is persisted."""
        self._pressed = asyncio.Event()
        """Set when a report contains a failure for lack of room on a node."""
        self._versioned = Versioned()
        self._building = set[Step]()
        """Steps whose manifest is being built in a thread."""
        self._has_all = set[Worker]()
        """The workers that have sent all of their shards."""
        self._weighing: asyncio.TimerHandle | None = None
        """Set while `_weigh_soon` has a call of `_weigh` scheduled."""
        self._hangs = HangWatch(self._gathered, secrets.token_hex(8))
        self._stragglers = StragglerWatch(self._gathered)
        self.dropped = 0
        """Steps that newer ones replaced before they were written or copied."""
        self._outbox = Outbox(
            settings,
            peers,
            self._ledger,
            clock,
            self._acknowledged,
            self._lost,
        )
        self._uploads = GangUploads(
            settings.contract,
            message,
            store,
            ledger=self._ledger,
            versioned=self._versioned,
            pools=pools,
            failures=failures,
            clock=clock,
            on_change=self._changed,
        )
        self._leftovers = Leftovers(
            settings.contract,
            message.round,
            store,
            pools=pools,
            clock=clock,
            uploading=self._uploading,
        )

    # ------------------------------------------------------------------ life cycle

    def start(self) -> None:
        self._outbox.start(self._message)
        self._tasks.spawn(self._uploads.run(), "uploads")
        self._tasks.spawn(self._uploads.compare(), "comparison with the store")
        self._tasks.spawn(self._leftovers.run(), "leftovers")
        self._tasks.spawn(self._make_room(), "room")
        self._tasks.spawn(self._finish_loop(), "finish")
        self._tasks.spawn(self._look_for_hangs(), "hangs")
        self._tasks.spawn(self._look_for_stragglers(), "stragglers")

    def update(self, message: Round) -> None:
        """Take over a higher version of the same ROUND."""
        complete = all(m.address for m in message.members)
        if complete and not all(m.address for m in self._message.members):
            self._gathered.started = self._clock.monotonic()
        self._message = message
        self._targets = message.targets()
        self._ledger.expects_copies = _expects_copies(message)
        self._outbox.update(message)
        self._uploads.policy(message)
        self._changed()

    @property
    def idle(self) -> bool:
        """Whether no step can reach a higher level without another save."""
        pending = self._choice().pending or self._ledger.pending
        return not (pending or self._ledger.on_way_to_store)

    @property
    def may_end(self) -> bool:
        """Whether this pod may end: it is idle, and the operator has received what no other pod can tell it.

        A restore from the object store alone needs the record of the last persisted step.
        """
        if not self._only_store_stays:
            return self.idle
        version = self._left_version
        return self.idle and version is not None and self._versioned.acknowledged(version)

    async def close(self) -> None:
        if self._weighing is not None:
            self._weighing.cancel()
        await self._tasks.cancel()
        await self._outbox.close()
        self._versioned.close()

    # ------------------------------------------------------------------ messages of members

    def report(self, message: WorkerReport) -> Ok:
        """Take over a worker's state. Return which of its shards is not accepted."""
        before = self._gathered.reports.get(message.worker)
        if not message.has_plan:
            self._outbox.repeat(message.worker)
        if message.has_all_shards:
            self._has_all.add(message.worker)
        wants_shards = message.worker not in self._has_all
        if wants_shards:
            message = replace(
                message, saves=()
            )  # they mean something together with all shards only
        urgent = self._gathered.receive(message, self._clock.monotonic())
        listed = self._take_manifests(message)
        refused = self._take_shards(message)
        self._look_for_lost(message.worker, everywhere=bool(listed))
        if before is None or before.saves != message.saves:
            self._weigh_soon()
        self._alarm.look(self._message.policy)
        pressed = self._gathered.pressed
        if pressed:
            self._pressed.set()
        # Until the own manifests are listed, a committed step of which a node has lost its shard looks like
        # one that was never complete.
        if self._message.coordinator in self._has_all:
            saves = self._gathered.saves(message.worker)
            ranks = map(Rank, ranks_of(message.worker, self._contract.procs_per_worker))
            self._give_up(abandoned_steps(self._ledger, saves, ranks, pressed=pressed))
        if urgent or message != before:
            self._versioned.bump(urgent=urgent)
        else:
            self._versioned.tick()
        return Ok(message.round, wants_shards, refused, self._hangs.token, self._waits_for_store)

    def _take_shards(self, message: WorkerReport) -> RefusedShard | None:
        """Record the shards of a report, then act on the steps of which something is new.

        Returns:
            The first shard that is not accepted.
        """
        base = self._message.restore_point.step
        new = set[Step]()
        refused: list[RefusedShard] = []
        for found in message.shards:
            step, rank = found.step, found.shard.rank
            if found.round != message.round:
                with contextlib.suppress(Conflict):
                    self._ledger.take(found)
            elif base is not None and step <= base:
                why = f"step {step} is not above the restore point (step {base})"
                refused.append(RefusedShard(step, rank, Refusal.BAD_REQUEST, why))
            elif not self._ledger.is_forgotten(step):
                try:
                    if self._ledger.take(found):
                        new.add(step)
                except Conflict as error:
                    refused.append(RefusedShard(step, rank, Refusal.CONFLICT, str(error)))
        # All shards are recorded first: a choice about slots must not take a later one of them for skipped.
        for step in sorted(new):
            self._advance(step)
        return refused[0] if refused else None

    def request(self, path: str, message: GangRequest) -> Ok:
        """Queue a save-now or stop request for worker 0, which runs rank 0, or end the job: stop and persist.

        The same request with the same token has an effect only once. The first step that is committed above
        the ranks' present progress is persisted.
        """
        if path == END:
            self._is_over = True
            self._versioned.tick()
            path = STOP
        if self._outbox.request(path, message):
            progress, base = self._gathered.progress, self._message.restore_point.step
            known = (base, None if progress is None else progress.last)
            self._uploads.ask_after(max((s for s in known if s is not None), default=Step(-1)))
        return Ok(message.round)

    async def prune(self, message: Prune) -> PruneReply:
        """Delete checkpoints from the object store, each manifest before its other objects.

        Raises:
            RefusedError: PROTECTED if one of them must stay, in which case none is deleted; NOT_FOUND if
                the job has no object store.
        """
        if self._store is None:
            raise RefusedError(Refusal.NOT_FOUND, "this job has no object store")
        for point in message.checkpoints:
            self._may_leave_store(point)
        deleted: list[RestorePoint] = []
        for point in message.checkpoints:
            if point.step is None or point.round is None:
                continue
            await self._pools.store.run(
                self._store.delete_checkpoint,
                point.job_namespace or self._contract.namespace,
                point.job_uid or self._contract.job_uid,
                CheckpointId(point.step, point.round),
            )
            deleted.append(point)
        return PruneReply(tuple(deleted))

    def _may_leave_store(self, point: RestorePoint) -> None:
        newest = self._uploads.last
        kept = protected_steps(self._message) | self._ledger.on_way_to_store
        if newest is not None and newest.step is not None:
            kept |= {newest.step}
        if point.step in kept or point.job_uid not in (None, self._contract.job_uid):
            raise RefusedError(
                Refusal.PROTECTED,
                (
                    f"step {point.step} is the restore point, pinned, the newest persisted step, being "
                    "uploaded, or of another job"
                ),
            )

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
            self._release()
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
            round=self._message.round,
            steps=self._ledger.states(_SHOWN_STEPS),
            last_local=_point(self._ledger.newest(Level.LOCAL)),
            last_replicated=_point(self._ledger.newest(Level.REPLICATED)),
            last_persisted=self._uploads.last,
            last_persisted_bytes=self._uploads.last_bytes,
            newest_is_stored=self._uploads.is_stored,
            dead=gathered.dead,
            progress=gathered.progress,
            failures=self._all_failures(),
            times=gathered.times,
            running=gathered.running,
            cannot_restore=gathered.cannot_restore,
            restore_may_succeed=gathered.restore_may_succeed,
            finished=self._finished_version is not None,
            saves_skipped=gathered.saves_skipped,
            hang=self._hangs.hang,
            accepted=gathered.accepted(self._clock.monotonic() - _SILENT_SECONDS),
            stragglers=self._stragglers.found,
            restored_from=gathered.restored_from,
        )

    def _all_failures(self) -> tuple[Failure, ...]:
        """Return all failures in the order in which they are reported.

        Those of node tiers come first, because they explain missing commits; then the commit alarm.
        """
        own = (replace(f, worker=self._message.coordinator) for f in self._failures.current)
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

    def _changed(self) -> None:
        """Show the operator a change now, and look for messages that follow from it for any member.

        This looks at all members, so code that only counts the messages of one member must not call it.
        """
        self._versioned.bump(urgent=True)
        self._outbox.wake()

    # ------------------------------------------------------------------ commit

    def _advance(self, step: Step) -> None:
        """Act on what has become known of the shards of a step."""
        entry = self._ledger.steps.get(step)
        if entry is None:
            return  # given up because of another step of the same report
        if entry.complete and entry.manifest is None:
            self._build(entry)
        if self._ledger.settle_local(step):
            self._is_local(step)
            return
        self._weigh_soon()
        if self._ledger.settle_replicated(step):
            self._retain()
            self._changed()

    def _build(self, entry: StepEntry) -> None:
        """Build the manifest of a step whose shards are all known, unless that is under way."""
        if entry.step not in self._building:
            self._building.add(entry.step)
            self._tasks.spawn(self._commit(entry), f"manifest of step {entry.step}")

    async def _commit(self, entry: StepEntry) -> None:
        """Build the manifest of a step in a thread. The outbox sends it to the members."""
        try:
            parent = self._message.restore_point.manifest
            built = await self._pools.read.run(build_manifest, self._contract, parent, entry)
        except HoldfastError as error:
            self._failures.note(
                f"manifest of step {entry.step}", TierName.NODE, error, step=entry.step
            )
            return
        finally:
            self._building.discard(entry.step)
        if self._ledger.steps.get(entry.step) is not entry:
            return  # The step was given up meanwhile.
        try:
            self._ledger.committed(entry.step, built.manifest, built.digest, built.shards)
        except Conflict as error:
            logs.warning("conflicting digests", error=str(error))
            return
        logs.info("manifest built", step=entry.step, round=entry.round, manifest=built.digest)
        self._changed()

    def _acknowledged(self, step: Step, worker: Worker) -> None:
        """Record that a member has the manifest on its disk."""
        if step not in self._ledger.steps:
            return
        if self._ledger.acknowledged(step, worker):
            self._is_local(step)
        elif worker == self._message.coordinator:
            self._changed()  # The other members may have the manifest now.

    def _is_local(self, step: Step) -> None:
        """Act on a step that has just become local."""
        logs.info("committed locally", step=step, round=self._message.round)
        self._ledger.settle_replicated(step)
        self._uploads.committed(step)
        if self._ledger.steps[step].copied:
            self._retain()
        elif gone := self._ledger.overtaken():
            self.dropped += len(gone)
            self._outbox.prune(gone)
        self._weigh()
        self._changed()

    def _weigh_soon(self) -> None:
        """Call `_weigh` after a short time, once for all messages until then, if a step waits."""
        if self._weighing is None and self._gathered.waits:
            loop = asyncio.get_running_loop()
            delay = max(_WEIGH_AFTER_SECONDS, self._gathered.world_size / _WEIGHED_PER_SECOND)
            self._weighing = loop.call_later(delay, self._weigh)

    def _choice(self) -> SlotChoice:
        """Return what becomes of the steps that wait in slots. If there are none, this looks at no rank."""
        if not self._gathered.waits and self._ledger.chosen is None:
            return SlotChoice()
        base = self._message.restore_point.step
        return choose(self._ledger, self._gathered.saves(), base)

    def _weigh(self) -> None:
        """Choose again which waiting step is written next, and drop those that are no longer needed."""
        if self._weighing is not None:
            self._weighing.cancel()
            self._weighing = None
        before, choice = self._ledger.chosen, self._choice()
        self._ledger.chosen = choice.chosen
        if choice.chosen != before:
            self._outbox.wake()
        if choice.dropped:
            logs.info("dropped from slots", steps=list(choice.dropped), chosen=choice.chosen)
            self.dropped += len(choice.dropped)
            self._outbox.prune(choice.dropped)

    def _retain(self) -> None:
        """Prune what the retention policy no longer keeps. Call this when a step has all its copies."""
        gone = steps_to_prune(self._ledger, self._message, self._older, self._uploads.last)
        self._forget(gone)

    async def _make_room(self) -> None:
        """Prune steps that the job can do without while a node has no room.

        This starts with the first report of the lack of room and repeats every second, because a commit may
        allow another step to be pruned without a report that follows it.
        """
        while True:
            await self._pressed.wait()
            if not self._gathered.pressed:
                self._pressed.clear()
                continue
            gone = steps_to_prune(
                self._ledger,
                self._message,
                self._older,
                self._uploads.last,
                pressed=True,
                restored=self._gathered.running,
            )
            saves = self._gathered.saves()
            ranks = map(Rank, range(self._ledger.world_size))
            abandoned = abandoned_steps(self._ledger, saves, ranks, pressed=True)
            self._give_up({*gone, *abandoned, *self._ledger.overtaken(pressed=True)})
            await self._clock.sleep(_PRESSED_EVERY_SECONDS)

    def _give_up(self, steps: Iterable[Step]) -> None:
        gone = tuple(sorted(set(steps) - self._ledger.on_way_to_store))
        if gone:
            logs.info("given up", steps=list(gone), pressed=self._gathered.pressed)
            self._forget(gone)
            self._changed()

    def _forget(self, gone: tuple[Step, ...]) -> None:
        self._older = {c for c in self._older if c.step not in gone}
        self._outbox.prune(gone)

    def _uploading(self) -> frozenset[CheckpointId]:
        return frozenset(self._ledger.uploads.wanted)

    def _lost(self, step: Step) -> None:
        """Handle that a member lacks its shard of a committed step of this round.

        The member pruned its shard before this coordinator started: the step is not sent to members again
        and is left to retention.
        """
        if not self._ledger.is_forgotten(step):
            self._ledger.forget((step,), pruned=False)
            self._older.add(CheckpointId(step, self._message.round))
            self._changed()

    def _take_manifests(self, message: WorkerReport) -> set[Step]:
        """Record the checkpoints whose manifest a member has. Return the steps of this round that are new.

        A quarantined one cannot be restored, so it must not count as one of those that retention keeps.
        """
        base, round_, apart = (
            self._message.restore_point.step,
            message.round,
            quarantined(self._message),
        )
        if base is not None:
            self._older |= {
                c
                for c in message.manifests
                if c.round < round_ and c.step <= base and c not in apart
            }
        found = {c.step for c in message.manifests if c.round == round_}
        new = {s for s in found - self._ledger.listed if base is None or s > base}
        self._ledger.listed |= new
        return new

    def _look_for_lost(self, worker: Worker, *, everywhere: bool) -> None:
        """Look for listed steps that a worker, or any, has no shard of."""
        workers = self._has_all if everywhere else self._has_all & {worker}
        saves = self._gathered.saves(None if everywhere else worker)
        ranks = (Rank(r) for w in workers for r in ranks_of(w, self._contract.procs_per_worker))
        for step in lost_steps(self._ledger, saves, ranks):
            self._lost(step)

    async def _look_for_hangs(self) -> None:
        changes = logs.Changed()
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            changed = self._hangs.look(self._message.policy, self._clock.monotonic())
            if changed and self._hangs.hang is not None:
                logs.warning("the gang hangs", detail=self._hangs.hang.message)
            if self._hangs.at_work:
                changes.log("no step", self._hangs.at_work, round=self._message.round)
            else:
                changes.healthy("no step")
            if changed:
                self._versioned.bump(urgent=True)

    async def _look_for_stragglers(self) -> None:
        # A look compares all ranks, so it is less frequent in a large gang.
        interval = max(_LOOK_SECONDS, self._gathered.world_size / _COMPARED_PER_SECOND)
        while True:
            await self._clock.sleep(interval)
            if self._stragglers.look(self._message.policy):
                logs.info("the stragglers have changed", ranks=self._stragglers.ranks)
                self._versioned.bump(urgent=True)

    # ------------------------------------------------------------------ finish

    async def _finish_loop(self) -> None:
        """Finish the job after all ranks have returned 0.

        The newest step is brought to every level that it is to reach, then the state reports `finished`.
        `_release` releases the pods once the operator has acknowledged that state.
        """
        while self._finished_version is None:
            await self._versioned.wait_tick(at_most_seconds=5.0)
            if self._is_over:
                await self._adopt_restore_point()
            if self._is_over or self._only_store_stays:
                self._persist_last_step()
            if not self._gathered.done:
                continue
            if self._done_at is None:
                self._done_at = self._clock.monotonic()
            self._uploads.finish(self._newest_that_stays())
            waited = self._clock.monotonic() - self._done_at
            if waited > self._settings.finish_give_up_seconds and not (
                self._gave_up or self._is_over
            ):
                self._gave_up = True
                self._uploads.give_up(waited)
            if self._settled():
                self._finished_version = self._versioned.bump(urgent=True)
                logs.info("finished", round=self._message.round)

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
        if ending and self._message.policy.shrinks:
            return False
        kept = all(self._gathered.stays(self._targets.get(worker, ())) for worker in ending)
        return kept and (self._ledger.expects_copies or not ending)

    @property
    def _waits_for_store(self) -> bool:
        """Whether no pod may end before the newest step is persisted.

        A step is persisted only if all workers upload their shards. So it is the same for all workers, and
        false once one of them is silent.
        """
        if self._store is None or self._copies_stay:
            return False
        # This looks at all workers, so it comes last: every report of each worker asks for it.
        return self._gathered.all_reported_since(self._clock.monotonic() - _SILENT_SECONDS)

    def _persist_last_step(self) -> None:
        """Persist the step at which the ranks have stopped, then report it to the operator immediately."""
        self._uploads.finish(self._newest_that_stays())
        if self._left_version is None and self.idle:
            self._left_version = self._versioned.bump(urgent=True)
            logs.info("the last step is persisted: a pod leaves", round=self._message.round)

    async def _adopt_restore_point(self) -> None:
        """Enter the restore point as a local step, if this round has none and the store lacks it.

        The members have its shards, from which the ranks were to restore.
        """
        point = self._message.restore_point.own_checkpoint
        comes = self._choice().pending or self._ledger.pending
        has_saved = comes or self._ledger.newest(Level.LOCAL) is not None
        if point is None or has_saved or self._uploads.has(point):
            return
        try:
            found = await self._pools.read.run(
                self._node.get_manifest, self._contract.job_uid, point
            )
            shards = await self._pools.read.run(shard_infos, found, self._contract.job_uid, point)
        except HoldfastError as error:
            self._failures.note(
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
        return None if comes or self._choice().pending else self._ledger.newest(Level.LOCAL)

    def _settled(self) -> bool:
        if self._gave_up:
            return True
        return self._gathered.idle and self.idle

    def _release(self) -> None:
        if self._finished_version is not None and self._versioned.acknowledged(
            self._finished_version
        ):
            self._outbox.release()


def _expects_copies(message: Round) -> bool:
    """Return whether steps are copied to peers.

    If not (one worker, or `peer_copies` 0), local implies replicated.
    """
    return message.policy.peer_copies > 0 and bool(message.copies)


def _point(entry: StepEntry | None) -> RestorePoint | None:
    return None if entry is None else entry.point()


class _Conflicts:
    """Context manager that turns the ledger's `Conflict` into RefusedError (CONFLICT)."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Conflict):
            logs.warning("conflicting digests", error=str(error))
            raise RefusedError(Refusal.CONFLICT, str(error)) from error
