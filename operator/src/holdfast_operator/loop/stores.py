"""One pass over a CheckpointStore: probe, drill and list it, and write its status at most once.

Short-lived pods with the keys of the store do the work (model/command_pods.py). A pass gathers what they have
reported, folds it into the status by the rules of `decide`, writes the status, and only then removes the pods
whose results it has: a pass that fails half way is repeated with the same results. Drills and listings wait
while a probe runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from holdfast_core import logs
from holdfast_core.api import Checkpoint, CheckpointStore, Gang, changed
from holdfast_core.clock import Clock
from holdfast_core.contract import DrillExit, StoreVerb, UsageContract
from holdfast_core.store_retention import is_stored
from holdfast_operator.apply.command_runs import LOOK_AGAIN_SECONDS, CommandRuns
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide import drills, stores, usages
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandReport,
    CommandState,
    CommandUnderway,
)
from holdfast_operator.model.job import store_view
from holdfast_operator.watch.cache import ClusterCache


@dataclass(slots=True)
class _Pass:
    """What one pass over a store knows so far."""

    store: CheckpointStore
    """The store with the status that the pass writes at its end."""
    now: datetime
    ended: list[StoreVerb] = field(default_factory=list)
    """Verbs whose pods have ended, and whose results are in the status."""
    waits: list[float] = field(default_factory=list)
    """Seconds after which another pass is due."""
    drilled: tuple[Checkpoint, drills.DrillResult] | None = None

    def set(self, **changes: Any) -> None:
        """Change these fields of the status."""
        self.store = changed(self.store, status=changed(self.store.status, **changes))

    def wait(self, seconds: float | None) -> None:
        """Let the next pass follow after this time; None: an event causes it."""
        self.waits.extend(() if seconds is None else (seconds,))

    def result(
        self, verb: StoreVerb, state: CommandState | None
    ) -> CommandReport | CommandFailed | None:
        """Return the result of a pod that has ended. While there is a pod, another pass follows soon."""
        if state is None:
            return None
        self.wait(LOOK_AGAIN_SECONDS)
        if isinstance(state, CommandUnderway):
            return None
        self.ended.append(verb)
        return state


@dataclass(frozen=True, slots=True)
class Stores:
    """Reconciler of CheckpointStores."""

    cluster: Cluster
    cache: ClusterCache
    events: Events
    commands: CommandRuns
    metrics: Metrics
    clock: Clock

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Run one pass over the store.

        Returns:
            Seconds after which the next pass is due without an event, or None if no pass is due.

        Raises:
            ApiError: A request failed.
            ConflictError: The store, or a Checkpoint that was drilled, changed since it was read.
        """
        read = self.cache.stores.get(namespace, name)
        if read is None:
            # A deleted store's pods are garbage-collected; those of an unreadable store stay.
            if self.cache.unreadable.get(CheckpointStore.KIND, namespace, name) is None:
                self.metrics.forget_store(namespace, name)
            return None
        if read.deleting:
            for verb in StoreVerb:
                await self.commands.end(read, verb)
            return None
        present = _Pass(read, self.clock.utc_now())
        await self._list(read)
        if await self._probe(present):
            await self._drill(present)
            await self._measure(present)
            present.wait(stores.next_look_seconds(present.store, present.now))
        if present.store.status != read.status:
            await self.cluster.write_status(read, present.store.status)
        await self._report(read, present)
        for verb in present.ended:
            await self.commands.end(read, verb)
        return min(present.waits, default=None)

    async def _list(self, store: CheckpointStore) -> None:
        """Start the pod of the list that a person asks for. Its log is the result, so the pod stays."""
        command = stores.list_command(store, self.clock.utc_now())
        if command is None:
            await self.commands.end(store, StoreVerb.LIST)
            return
        state = await self.commands.run(store, command)
        if isinstance(state, CommandFailed) and state.failure is CommandFailure.REFUSED:
            await self.events.emit(store, "Warning", stores.LIST_FAILED, state.message)

    async def _probe(self, present: _Pass) -> bool:
        """Run the probe if it is due. Return whether none is under way or has just ended."""
        store = present.store
        newest = self.cache.jobs.newest_start(store.namespace, store.name)
        due = stores.probe_due(store, newest, present.now)
        state = await self.commands.run(store, stores.probe_command(store), due=due)
        refused = isinstance(state, CommandFailed) and state.failure is CommandFailure.REFUSED
        if refused and store_view(store).available:
            # A full quota of the namespace says nothing about a store that was available. The job that makes
            # the probe due may be suspended for days.
            present.wait(stores.AGAIN_LATEST.total_seconds())
            return True
        result = present.result(StoreVerb.PROBE, state)
        if result is not None:
            present.store = changed(store, status=stores.with_probe(store, result, present.now))
        return state is None

    async def _drill(self, present: _Pass) -> None:
        """Begin, follow or end a drill. The status of its Checkpoint is written before that of the store."""
        store, now, known = present.store, present.now, present.store.status.drills
        if known is None or not known.checkpoint:
            place, checkpoints = (store.namespace, store.name), self.cache.checkpoints
            requested, stored = (
                checkpoints.of("drill", *place),
                checkpoints.members("store", *place),
            )
            await self.commands.end(store, StoreVerb.DRILL)  # left by a pass that died
            begun = drills.next_drill(store, requested, stored, now)
            if begun is not None:
                present.set(drills=begun)
            soon = None if begun is None else LOOK_AGAIN_SECONDS
            present.wait(soon or drills.next_drill_seconds(store, now))
            return
        checkpoint = self.cache.checkpoints.get(store.namespace, known.checkpoint)
        if checkpoint is None or not drills.is_wanted(checkpoint, known):
            present.set(drills=drills.ended(store, None, now))
            present.ended.append(StoreVerb.DRILL)
            present.wait(LOOK_AGAIN_SECONDS)
            return
        command = drills.drill_command(store, known, checkpoint)
        state = await self.commands.run(store, command, due=store.available is not False)
        report = present.result(StoreVerb.DRILL, state or drills.unavailable(store))
        if report is None:
            return
        result, ranks = drills.drill_result(report), drills.ranks_of(store, known, checkpoint)
        status = drills.drilled_status(checkpoint, result, known, ranks, now)
        await self.cluster.write_status(checkpoint, status)
        present.set(drills=drills.ended(store, result.verified is not None, now))
        present.drilled = checkpoint, result

    async def _measure(self, present: _Pass) -> None:
        """List the store for its usage, and compare it with the quota."""
        store, now = present.store, present.now
        is_available = bool(store_view(store).available)
        due = is_available and not usages.seconds_to_listing(store, now)
        command = usages.listing_command(store, self._request(store) if due else UsageContract())
        state = await self.commands.run(store, command, due=due)
        result = present.result(StoreVerb.USAGE, state)
        if result is not None:
            names = {job.uid: job.name for job in self.cache.jobs.all()}
            store = changed(store, status=usages.with_listing(store, result, names, now))
        if result is not None or usages.quota_is_new(store):
            store = changed(store, status=usages.with_quota(store, self._pinned(store), now))
        present.store = store
        if is_available:
            present.wait(max(LOOK_AGAIN_SECONDS, usages.seconds_to_listing(store, now)))

    def _request(self, wanted: CheckpointStore) -> UsageContract:
        """Return what a listing may delete. Several CheckpointStores may be at one location."""
        jobs = [
            job
            for store in self.cache.stores.all()
            if usages.location(store) == usages.location(wanted)
            for job in self.cache.jobs.of(store.KIND, store.namespace, store.name)
        ]
        ended = {job.uid for job in jobs if self._has_ended(job)}
        return usages.request_of(wanted, {job.uid for job in jobs} - ended, ended)

    def _has_ended(self, job: Gang) -> bool:
        """Return whether a job is over and has no pod that could still upload."""
        is_over = job.status.completion_time is not None
        return is_over and not self.cache.pods.workers(job.namespace, job.uid)

    def _pinned(self, store: CheckpointStore) -> list[Checkpoint]:
        """Return the pinned checkpoints of the store's jobs, whose data it has."""
        jobs = {j.name for j in self.cache.jobs.of(store.KIND, store.namespace, store.name)}
        return [
            checkpoint
            for name in sorted(jobs)
            for checkpoint in self.cache.checkpoints.of(store.namespace, name)
            if checkpoint.spec.pin and is_stored(checkpoint)
        ]

    async def _report(self, read: CheckpointStore, present: _Pass) -> None:
        """Set the metrics of the store, and emit the Events about what the pass has found."""
        store, status = present.store, present.store.status
        ratio = usages.quota_ratio(store)
        self.metrics.store_listed(store.namespace, store.name, status.usage, ratio)
        for event in stores.store_events(read.status, status):
            text = f"store {event.reason}: {event.message}"
            logs.info(text, namespace=store.namespace, store=store.name)
            await self.events.emit(read, event.kind, event.reason, event.message)
        if present.drilled is not None:
            await self._report_drill(store, *present.drilled)

    async def _report_drill(
        self, store: CheckpointStore, checkpoint: Checkpoint, result: drills.DrillResult
    ) -> None:
        """Emit Events on the Checkpoint, and on its job if it is damaged."""
        self.metrics.drilled(store.namespace, store.name, result.exit, result.bytes, result.seconds)
        namespace, uid = checkpoint.namespace, checkpoint.status.job_uid
        jobs = self.cache.jobs.of_name(namespace, checkpoint.job)
        job = next((j for j in jobs if j.uid == uid), None)
        of_name = self.cache.checkpoints.of(namespace, checkpoint.job)
        own = [c for c in of_name if c.status.job_uid == uid]
        event = drills.drill_event(checkpoint, result, job, own)
        text = f"drill {event.reason}: {event.message}"
        logs.info(text, namespace=namespace, checkpoint=checkpoint.name)
        await self.events.emit(checkpoint, event.kind, event.reason, event.message)
        if result.exit is DrillExit.DAMAGED and job is not None:
            text = f"Checkpoint {checkpoint.name}: {event.message}"
            await self.events.emit(job, event.kind, event.reason, text)
