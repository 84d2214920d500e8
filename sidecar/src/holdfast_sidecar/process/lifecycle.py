"""SEAL and ROUND: how a sidecar moves from one round to the next, and when it ends (docs/protocol.md).

A background task or thread that ends with an exception leaves a part of the sidecar missing while the rest
looks healthy. Therefore the process ends, the kubelet restarts the container, and the next process resumes
from the node's disk and the shared memory. Exceptions of single connections and callbacks, which a peer may
be able to cause, are only counted and logged.

On SEAL, the sidecar
1. takes the new round into its state, so that it accepts nothing of the old round any more;
2. records the new round durably;
3. stops everything that works for the old round;
4. ends the ranks;
5. waits for the writes under way, then writes the other slots that ranks have handed over, both within time
   limits;
6. replies with the inventory.

On ROUND, it records the round and version durably and takes them into its state. A spare also records the
worker that it becomes. If the round is new, it deletes steps off the lineage and starts the coordinator (if
it is the one), rehydration and rendezvous. A higher version of the same round only changes members, copies
and the coordinator.

Between the two, the operator may send FinishCommit. The sidecar then writes the manifest of a commit that
the failure has interrupted.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdfast_core import logs
from holdfast_core.errors import AlreadyExistsError, NotFoundError, RefusedError, SwappedError
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import FinishCommit, Inventory, Refusal, Round, Seal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.peer.server import CONNECTION_THREAD
from holdfast_core.tasks import BACKGROUND_TASK, Tasks
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import Caller, RoundState, refuse
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.process.components import Components
from holdfast_sidecar.process.inventory import Inventories
from holdfast_sidecar.restore.rehydrate import Restored
from holdfast_sidecar.save.flow import own_shard
from holdfast_sidecar.upkeep.prune import delete_off_lineage, delete_orphans, protected_steps

DIED_STATUS = 70
"""Exit status of a sidecar that an unexpected exception ended (EX_SOFTWARE)."""
_SHUTDOWN_SECONDS = 30.0


class Deaths:
    """Handler of the uncaught exceptions of one event loop and of all threads of this process."""

    def __init__(self, counted: Callable[[str], None]) -> None:
        """Create the handler; `install` puts it in place.

        Args:
            counted: Called on the loop with the kind of each uncaught exception: "task", "thread",
                "callback" or "connection".
        """
        self._counted = counted
        self._log_changes = logs.Changed()
        self._fatal = asyncio.Event()

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Install the handlers of the loop and of all threads. Call this on the loop."""
        loop.set_exception_handler(self.in_loop)

        def in_thread(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not loop.is_closed():
                name = "?" if args.thread is None else args.thread.name
                loop.call_soon_threadsafe(self.in_thread, name, args.exc_value)

        threading.excepthook = in_thread

    @property
    def is_fatal(self) -> bool:
        return self._fatal.is_set()

    async def fatal(self) -> None:
        """Return once an exception was fatal."""
        await self._fatal.wait()

    def in_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the loop. Only that of a background task is fatal."""
        error = context.get("exception")
        if BACKGROUND_TASK in context:
            self._die(context["message"], error, "task")
        else:
            self._counted("callback")
            self._log_changes.warning("event loop", f"{context['message']}: {error!r}")

    def in_thread(self, name: str, error: BaseException) -> None:
        """Handle the exception that ended a thread. That of a bulk connection's thread is not fatal."""
        if name == CONNECTION_THREAD:
            self._counted("connection")
            self._log_changes.warning(
                "bulk connection", f"the thread of a bulk connection ended: {error!r}"
            )
        else:
            self._die(f"thread {name!r} ended with an unexpected error", error, "thread")

    def _die(self, what: str, error: BaseException | None, kind: str) -> None:
        self._counted(kind)
        if error is not None:
            logs.failure(f"{what}: the sidecar ends with status {DIED_STATUS}", error)
        self._fatal.set()


def end_for_sure() -> None:
    """End this process after `_SHUTDOWN_SECONDS`, even if its shutdown hangs."""
    guard = threading.Timer(_SHUTDOWN_SECONDS, os._exit, (DIED_STATUS,))
    guard.daemon = True
    guard.start()


_COPY_AFTER_SECONDS = 10.0
"""Longest time for which copies of the restore point wait for the first step of a round."""
_LOOK_SECONDS = 0.2


class Lifecycle:
    """Handler of SEAL and ROUND. One of them is carried out at a time."""

    def __init__(
        self,
        pod: Pod,
        disk: DiskNodeTier,
        tiers: Tiers,
        components: Components,
        background: BackgroundLimit,
        telemetry: Telemetry,
    ) -> None:
        """Create the handler, and subscribe it to the progress of restores."""
        self._pod = pod
        self._disk = disk
        self._tiers = tiers
        self._saves = components.saves
        self._restores = components.restores
        self._gang = components.gang
        self._starter = components.starter
        self._components = components
        self._background = background
        self._telemetry = telemetry
        self._inventories = Inventories(pod, tiers, components.saves, telemetry)
        self._lock = asyncio.Lock()
        self._tasks = Tasks()
        self._unsettled: RoundState | None = None
        """The state before a SEAL that still waits for writes. Meanwhile, inventories name the round of
        this state: the operator takes an inventory that names the new round as the reply to SEAL, and would
        choose the restore point without the steps that are still being written."""
        self._settle_from: tuple[RestartRound, float] | None = None
        """The sealed round, and the monotonic seconds since which its seal waits for writes."""
        self._restores.progressed.subscribe(self._on_restore_progress)

    async def resume(self) -> None:
        """Continue the seal during which an earlier process of this pod died, if there was one.

        Call this before any request is served.
        """
        state = self._pod.state
        if state.version_floor or state.round == self._pod.contract.birth_round:
            return
        if await self._saves.stager.take_left():
            self._unsettled = replace(state, round=RestartRound(state.round - 1))
            self._tasks.spawn(
                self._resume_seal(state.round),
                "SEAL that was received before a restart of the sidecar",
            )

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._components.role.end()

    # ------------------------------------------------------------------ SEAL

    async def seal(self, caller: Caller, message: Seal) -> Inventory:
        """Seal the round and wait, within the time limits, for its writes. Return the inventory.

        A repeated SEAL of the same round is allowed.

        Raises:
            StaleRoundError: The round is older than the current one.
            RefusedError: NOT_MEMBER if the caller is not the operator.
        """
        self._check(caller, message)
        if message.round > self._pod.state.round:
            logs.info("sealed", round=message.round)
            self._background.remove_limit()
            self._unsettled = self._unsettled or self._pod.state
            self._pod.current.state = self._pod.state.sealed_for(message.round)
            self._saves.stager.seal()
            # Fills stop now and not when the seal is settled: from now on the slots belong to the next round.
            self._restores.filler.stop(f"round {message.round} is sealed")
        async with self._lock:
            self._check(caller, message)
            await self._settle_seal(message.round)
            if not message.look_in_store:
                return await self.inventory()
        await self._inventories.look_in_store(message.round, self._tasks)
        return await self.inventory()

    async def _settle_seal(self, round_: RestartRound) -> None:
        """Carry out steps 2 to 5 of a SEAL. A repeated SEAL runs them again, which is fast if all is done."""
        if self._pod.state.accepted is not None or self._pod.state.round != round_:
            return
        await self._record(round_, 0)
        await self._components.role.end()
        await asyncio.gather(
            self._saves.flow.reset(), self._restores.rehydrator.reset(), self._starter.reset()
        )
        await self._starter.end_ranks(round_)
        await self._settle_writes(round_)
        self._gang.reset()
        self._telemetry.failures.clear()
        self._is_settled(round_)

    async def _resume_seal(self, round_: RestartRound) -> None:
        async with self._lock:
            state = self._pod.state
            if state.accepted is None and state.round == round_:
                await self._settle_writes(round_)
            self._is_settled(round_)

    def _is_settled(self, round_: RestartRound) -> None:
        """Let inventories name the new round, unless a newer SEAL has come meanwhile."""
        if self._pod.state.round == round_:
            self._unsettled = None

    async def _settle_writes(self, round_: RestartRound) -> None:
        """Wait for the writes under way, then write what else the ranks have handed over.

        Which of these steps all ranks have is not known here: the operator finds it in the inventories, and
        finishes the commit of the newest one (ADR 0018).

        The time limits count from the first SEAL of the round.
        """
        settings, clock = self._pod.settings, self._pod.clock
        if self._settle_from is None or self._settle_from[0] != round_:
            self._settle_from = (round_, clock.monotonic())
        started = self._settle_from[1]

        def left(seconds: float) -> float:
            return max(0.0, started + seconds - clock.monotonic())

        settled = await self._saves.stager.settle(left(settings.settle_seconds))
        if not settled:
            logs.warning(
                "writes of the old round are still in progress", seconds=settings.settle_seconds
            )
        await self._tiers.pools.drain_writes(left(settings.settle_seconds))
        # If the disk was too slow for the writes under way, it is too slow for further ones in this time.
        seconds = left(settings.seal_seconds)
        if not settled or not await self._saves.stager.write_waiting(seconds):
            logs.warning("steps in slots are not written", seconds=settings.seal_seconds)

    async def _record(self, round_: RestartRound, version: int) -> None:
        recorded = await self._tiers.pools.read.run(self._disk.records.read_round)
        if recorded is not None and recorded >= (round_, version):
            return
        await self._tiers.pools.meta.run(self._disk.records.write_round, round_, version)

    # ------------------------------------------------------------------ ROUND

    async def round(self, caller: Caller, message: Round) -> Inventory:
        """Begin a round that was sealed, or take over a higher version of the current one.

        Raises:
            StaleRoundError: The round is older than the current one.
            RefusedError: NOT_SEALED, NOT_NEWER, or NOT_MEMBER if the caller is not the operator.
            TierError: The node tier cannot be read or changed. The sidecar stays sealed.
        """
        async with self._lock:
            self._check(caller, message)
            sealed, before = self._pod.state, self._pod.state.accepted
            becomes = self._pod.state.named_in(message)
            if becomes is not None and becomes != self._pod.state.worker:
                # The worker is recorded first: a process that dies here is this worker when it starts again.
                await self._tiers.pools.meta.run(self._disk.records.write_worker, becomes)
                logs.info("the spare becomes a worker", worker=becomes, round=message.round)
            await self._record(message.round, message.version)
            content = await asyncio.to_thread(message.content_digest)
            # A SEAL does not wait for the lock: it may have come during these waits, and a ROUND of the old
            # round must not unseal the new one.
            self._check(caller, message)
            self._saves.flow.resuming = before is None
            self._pod.current.state = self._pod.state.accepting(message, content)
            self._unsettled = None
            self._telemetry.metrics.level(pending=self._saves.flow.pending, round_=message.round)
            if before is None:
                logs.info("round begins", round=message.round, step=message.restore_point.step)
                try:
                    if not sealed.version_floor:  # else ranks of this round may run
                        await self._saves.layouts.clear()
                    await self._begin(message)
                except Exception:
                    # The operator repeats ROUND. A sidecar that held it already would begin nothing then.
                    if self._pod.state.accepted is message:
                        self._pod.current.state = replace(
                            sealed, worker=self._pod.state.worker, version_floor=message.version
                        )
                        await self._components.role.end()
                    raise
            else:
                await self._continue(before, message)
            return await self.inventory()

    async def finish_commit(self, caller: Caller, message: FinishCommit) -> Inventory:
        """Write the manifest of a step whose commit the failure has interrupted (ADR 0018).

        Raises:
            StaleRoundError: The round is older than the current one.
            RefusedError: NOT_SEALED if the sidecar is not between SEAL and ROUND of this round; CONFLICT if
                it has another manifest of this step; NOT_MEMBER if the caller is not the operator.
            FormatError, SwappedError: The manifest is not valid, or of another job.
            NotFoundError: The shard of an own rank that it names is not on the node tier.
        """
        async with self._lock:
            self._check(caller, message)
            document = message.manifest.encode()
            made = await self._tiers.pools.meta.run(self._finish_commit, document)
            logs.info("finished an interrupted commit", step=made.step, round=made.round)
            return await self.inventory()

    def _finish_commit(self, document: bytes) -> CheckpointId:
        """Check the manifest against this node's shards, write it, and return its checkpoint. Blocking."""
        uid, manifest = self._pod.job_uid, parse_manifest(document)
        if (job := manifest.job).uid != uid or job.namespace != self._pod.contract.namespace:
            raise SwappedError(f"the manifest names job {job.uid} in namespace {job.namespace}")
        for number in self._pod.state.own_ranks:
            ref = manifest.ref(Rank(number))
            if self._disk.find(ref) is None:
                raise NotFoundError(
                    f"{ref} is not on the node tier: no commit of it can be finished"
                )
        try:
            self._disk.put_manifest(uid, manifest.checkpoint, document)
        except AlreadyExistsError as error:
            raise RefusedError(Refusal.CONFLICT, str(error)) from error
        return manifest.checkpoint

    def _check(self, caller: Caller, message: Seal | Round | FinishCommit) -> None:
        raise_refused(refuse(self._pod.state, caller, message))

    async def _begin(self, message: Round) -> None:
        uid = self._pod.job_uid
        await self._tiers.pools.shard.run(delete_off_lineage, self._tiers.node, uid, message)
        if message.restore_point.own_checkpoint is not None:
            # Orphans are deleted before the first replicated step, because the first save may need the room.
            await self._tiers.pools.shard.run(
                delete_orphans,
                self._tiers.node,
                uid,
                before=message.round,
                below=message.restore_point.own_checkpoint.step,
                protected=protected_steps(message),
            )
        durable = await self._resume_own_shards(message.round)
        if self._pod.state.accepted is not message:
            return  # A SEAL has come meanwhile. It writes what waits in slots, which `recover` would free.
        self._saves.flow.resuming = False
        self._saves.stager.recover(self._pod.state, durable)
        self._background.begin()
        self._components.role.begin(message)
        self._restores.rehydrator.begin(message)
        self._starter.begin()
        self._components.changed()

    async def _continue(self, before: Round, message: Round) -> None:
        if before.coordinator != message.coordinator:
            await self._components.role.end()
            self._components.role.begin(message)
            self._saves.flow.coordinator_changed()
        elif self._components.role.coordinator is not None:
            self._components.role.coordinator.update(message)
        self._restores.rehydrator.retry_now()
        self._starter.evaluate()
        self._saves.flow.wake()
        self._components.changed()

    async def _manifests(self) -> frozenset[CheckpointId]:
        return await self._tiers.checkpoints(self._pod.job_uid)

    async def _resume_own_shards(self, round_: RestartRound) -> frozenset[tuple[Rank, Step]]:
        """Add own shards of this round that are on the node tier to the flow. Return their ranks and steps.

        There are some if this process has restarted during the round.
        """
        found: set[tuple[Rank, Step]] = set()
        own = self._pod.state.own_ranks
        uid = self._pod.job_uid
        manifests = await self._manifests()
        for record in await self._tiers.pools.read.run(self._tiers.node.list_shards):
            header = record.header
            if (header.job_uid, header.round) == (uid, round_) and header.rank in own:
                committed = record.checkpoint in manifests
                self._saves.flow.add(own_shard(record, committed=committed))
                found.add((header.rank, header.step))
        return frozenset(found)

    async def _restored(self) -> None:
        """Start the ranks if they may start, after the restore point has arrived on this node.

        Own shards of the restore point that an older round saved are copied again to targets that lack them,
        once the ranks have finished a step: before, the copies would delay the recovery of the whole gang.
        """
        restored = self._restores.rehydrator.restored
        if restored is None:
            return
        self._starter.evaluate()
        if not restored.refs or not await self._first_step(restored):
            return
        for ref in restored.refs.values():
            if ref.job_uid != self._pod.job_uid:
                continue
            record = await self._tiers.pools.read.run(self._tiers.node.find, ref)
            if self._restores.rehydrator.restored is not restored:
                return
            if record is not None and record.header.round != self._pod.state.round:
                self._saves.flow.add(replace(own_shard(record, committed=True), reported=False))

    async def _first_step(self, restored: Restored) -> bool:
        """Wait until the own ranks have finished a step, at most for _COPY_AFTER_SECONDS.

        Returns:
            Whether the round of the restore goes on.
        """
        pod, gang = self._pod, self._gang
        until = pod.clock.monotonic() + _COPY_AFTER_SECONDS
        while self._restores.rehydrator.restored is restored:
            if gang.trains(pod.state.round, pod.state.own_ranks) or pod.clock.monotonic() >= until:
                return True
            await pod.clock.sleep(_LOOK_SECONDS)
        return False

    def _on_restore_progress(self) -> None:
        self._tasks.spawn(self._restored(), "restored")

    # ------------------------------------------------------------------ inventory

    async def inventory(self) -> Inventory:
        """Return what this worker has now."""
        # The state is read before anything is listed. If a seal were settled while the list is made, the
        # inventory would name its round but lack what the seal has just written, and the operator would
        # choose an older step.
        state = self._unsettled or self._pod.state
        return await self._inventories.take(state, launcher=self._starter.has_launcher)
