"""The operator's loop: key -> observe -> decide -> apply, the gauges, and the sweep of deleted jobs.

The controller keeps only state that a restart of the process may lose: the memory that one decision hands to
the next. It uses neither kopf nor HTTP directly, and decide() takes all decisions about jobs.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, assert_never

from holdfast_core import logs
from holdfast_core.api import (
    Checkpoint,
    CheckpointPhase,
    CheckpointStore,
    Gang,
)
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid
from holdfast_core.names import first_of
from holdfast_operator.apply.apply import Applied, JobEffects, Present, apply, memory_after
from holdfast_operator.apply.command_runs import CommandRuns
from holdfast_operator.apply.reports import Reports
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.base.settings import Settings
from holdfast_operator.decide import ends
from holdfast_operator.decide.checkpoints import (
    SETTLE_SECONDS,
    WRITES_PER_PASS,
    imported,
    moved,
    unsaved,
    without_job,
)
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.scheduling import leaving
from holdfast_operator.kube.api import ConflictError, KubeApi
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.kube.leadership import LeaseThread
from holdfast_operator.loop.deletions import Deletions
from holdfast_operator.loop.observe import Observer, Owners, SilenceChecks, TemplateChecks
from holdfast_operator.loop.stores import Stores
from holdfast_operator.loop.workqueue import WorkQueue
from holdfast_operator.model.actions import Decision, Delete, described
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import (
    JobMemory,
    Now,
    Observed,
    StoreView,
    Unreadable,
    store_view,
)
from holdfast_operator.model.ownership import Key, KeyKind, gang_key, log_fields, store_key
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.certificates import Certificates
from holdfast_operator.sidecars.client import SidecarClient
from holdfast_operator.watch.cache import ClusterCache
from holdfast_operator.watch.nodes import NodeLeases
from holdfast_operator.watch.reflector import Reflector, Timings

TICK_SECONDS = 1.0
SWEEP_SECONDS = 3600.0
LONG_PASS_SECONDS = 0.02
RESTS_PER_PASS = 4.0
"""After a pass of LONG_PASS_SECONDS or more, the job's next pass waits this many times as long. Each answer
of a sidecar requests a pass. Without the wait, a recovery of 1,024 workers had 1,025 passes of 60 ms each and
took 100 seconds (ADR 0005)."""


LARGE_JOB_OBJECTS = 1000
"""Number of pods and Checkpoints of a job from which its decisions run in a thread, so that the event loop
serves other jobs meanwhile. A pass over 1,024 workers took 60 ms (ADR 0005)."""


class IncompletePass(HoldfastError):
    """Error of a pass that did not carry out its whole decision.

    Args:
        failed: True if a call failed, False if the decision was based on outdated reads.
    """

    def __init__(self, *, failed: bool) -> None:
        super().__init__("a part of the decision was not carried out")
        self.failed = failed


class Controller:
    """Owner of the caches, the work queue and all passes over jobs and stores.

    Call `enqueue` from the event loop's thread only.
    """

    def __init__(
        self,
        settings: Settings,
        api: KubeApi,
        leadership: LeaseThread,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._leadership = leadership
        self._clock = clock
        self._metrics = metrics
        self._begun = clock.monotonic(), clock.utc_now()
        self._sidecar = SidecarSettings(
            image=settings.sidecar_image,
            pull_policy=settings.sidecar_image_pull_policy,
            network=settings.worker_network,
        )
        self._queue: WorkQueue[Key] = WorkQueue(
            clock, self._pass_failed, random.Random(), self._comes_first
        )
        self._cluster = Cluster(api)
        self._cache = ClusterCache(
            api,
            clock,
            settings.watch_namespaces,
            self.enqueue,
            self._job_gone,
            Timings(silence_seconds=settings.watch_silence_seconds),
        )
        self._certificates = Certificates(self._cluster, settings.operator_namespace)
        self._client = SidecarClient()
        self._sidecars = Sidecars(
            self._client, self._certificates.client, clock, self._queue.add, metrics.unexpected
        )
        self._events = events = Events(self._cluster, clock)
        self._present = Present(clock)
        self._effects = JobEffects(
            self._cluster,
            self._cache,
            self._sidecars,
            self._certificates,
            events,
            metrics,
            self._present,
        )
        self._owners = Owners(self._cluster)
        self._reports = Reports(self._cluster, events, clock)
        self._observer = Observer(
            self._cache,
            self._sidecars,
            self._present,
            self._sidecar,
            clock,
            settings.failing_conditions,
            settings.leaving_taints,
        )
        self._templates = TemplateChecks(self._cluster, self._sidecar, clock, self._queue.add_after)
        self._silence = SilenceChecks(
            self._cache,
            self._observer,
            self._sidecars,
            self._cluster,
            clock,
            metrics,
            self.enqueue,
        )
        self._commands = CommandRuns(self._cluster, self._cache, self._sidecar, clock)
        self._stores = Stores(self._cluster, self._cache, events, self._commands, metrics, clock)
        self._deletions = Deletions(
            self._cluster,
            self._cache,
            events,
            self._commands,
            self._effects.release_checkpoint,
            clock,
        )
        self._memory: dict[JobUid, JobMemory] = {}
        self._log_changes = logs.Changed()
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.queue_depth.set_function(lambda: self._queue.depth)
        metrics.leads.set_function(lambda: leadership.leads)

    def enqueue(self, key: Key) -> None:
        """Request a pass over this object. Until this process leads, nothing is queued."""
        if self._leadership.gained.is_set():
            self._queue.add(key)

    @property
    def watches(self) -> Sequence[Reflector[Any]]:
        return self._cache.reflectors

    def watch_age_seconds(self) -> float | None:
        """Return the seconds since the most silent watch delivered anything.

        None if a watch has not completed its first LIST yet.
        """
        now = self._clock.monotonic()
        contacts = [r.last_contact for r in self._cache.reflectors]
        known = [c for c in contacts if c is not None]
        return now - min(known) if len(known) == len(contacts) else None

    def stalled_watches(self) -> list[str]:
        """Return the names of watches whose loops stand still, so that only a restart helps."""
        return self._cache.stalled_watches()

    async def run(self) -> None:
        """Run until cancelled, or until another process has taken the lease (LeaseLostError in a group).

        1. The reflectors run, in a standby too.
        2. When every reflector holds a complete copy, this process competes for the lease.
        3. When it holds the lease, it handles all objects, and then those that change.
        4. At the end it gives the lease back.
        """
        await self._client.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._cache.run())
                group.create_task(self._report())
                await self._cache.wait_synced()
                logs.info("all watches are in sync", jobs=len(self._cache.jobs.all()))
                group.create_task(self._leadership.run())
                await self._leadership.gained.wait()
                self._cache.enqueue_all()
                group.create_task(self._queue.run(self._settings.workers, self.handle))
                group.create_task(self._silence.run())
                group.create_task(self._sweep())
        finally:
            for task in self._tasks:
                task.cancel()
            await self._leadership.release()
            await self._sidecars.close()
            await self._client.close()

    def _comes_first(self, key: Key) -> bool:
        """Return whether passes over this object go before those over jobs that have not trained yet.

        A gang that has lost a pod must not wait until a thousand new jobs have their pods.
        """
        job = self._cache.jobs.get(key)
        return job is None or job.status.step is not None

    # ------------------------------------------------------------------ one pass

    async def handle(self, key: Key) -> None:
        """Run one pass over the object of this key. The queue repeats it where it raises."""
        begun = self._clock.monotonic()
        match key.kind:
            case KeyKind.JOB | KeyKind.ADOPTION:
                await self._job(key)
            case KeyKind.STORE:
                hidden = self._cache.unreadable.get(CheckpointStore.KIND, key.namespace, key.name)
                if hidden is not None:
                    await self._reports.report(hidden)
                elif (store := self._cache.stores.get(key.namespace, key.name)) is not None:
                    self._reports.is_read(store.uid)
                again = await self._stores.reconcile(key.namespace, key.name)
                if again is not None:
                    self._queue.add_after(key, again)
                if self._cache.has_deletions(key.namespace, key.name):
                    again = await self._deletions.reconcile(key.namespace, key.name)
                    if again is not None:
                        self._queue.add_after(key, again)
            case _:
                assert_never(key.kind)
        self._metrics.pass_seconds.labels(key.kind).observe(self._clock.monotonic() - begun)

    async def _job(self, key: Key) -> None:
        await self._record_imports(key)
        await self._record_losses(key)
        job = self._cache.jobs.get(key)
        if job is None:
            await release_pods(self._cache, self._cluster, key)
            hidden, again = self._cache.unreadable_job(key), None
            if hidden is not None:
                await self._reports.report(hidden)
            elif not self._cache.jobs.of_name(key.namespace, key.name):
                again = await self._release_checkpoints(key)
            self._queue.forget(key)
            if again is not None:
                self._queue.add_after(key, again)
            return
        self._reports.is_read(job.uid)
        wait = self._cache.wait_seconds(job.uid)
        if wait is not None:
            self._queue.add_after(key, wait)  # the expected event adds the key as well
            return
        try:
            async with self._reports.of_pass(job):
                applied = await self._pass(key, job)
            await self._reports.ended(job, applied.error)
        finally:
            if not self._cache.has_job(key, job.uid):
                self._forget(job)  # it was deleted during the pass, perhaps by the pass
        if not applied.complete:
            raise self._incomplete(key, job, applied)

    async def _pass(self, key: Key, job: Gang) -> Applied:
        """Observe, decide and apply once. Return what was carried out."""
        refusal = await self._templates.refusal(key, job)
        owner = await self._owners.of(job, self._observer.pods(job))
        memory = self._memory.get(job.uid, JobMemory())
        begun = self._clock.monotonic()
        observed = self._observer.observe(job, memory, refusal, owner)
        moment = self._now()
        decision = await decided(observed, moment)
        taken = self._clock.monotonic() - begun
        if taken >= LONG_PASS_SECONDS:
            self._queue.rest(key, RESTS_PER_PASS * taken)
        self._log_changes.info(str(key), decision.reason, **log_fields(job))
        deletes = [d for d in decision.deletes if isinstance(d, Delete)]
        if deletes:
            names = first_of([f"{d.kind} {d.name}" for d in deletes])
            text = f"deleting {names}: {deletes[0].reason}"
            self._log_changes.info(f"{key} deletes", text, **log_fields(job))
        applied = await apply(decision, observed, self._effects)
        self._memory[job.uid] = memory_after(decision, observed, applied)
        await release_pods(self._cache, self._cluster, key)
        if applied.complete:
            self._sidecars.acted_on(job.uid, decision.acted_version)
            if decision.requeue_after_seconds is not None:
                self._queue.add_after(key, decision.requeue_after_seconds)
        return applied

    def _now(self) -> Now:
        monotonic, utc = self._clock.monotonic(), self._clock.utc_now()
        begun_monotonic, begun_utc = self._begun
        jumped = utc - begun_utc - timedelta(seconds=monotonic - begun_monotonic)
        return Now(monotonic, utc, jumped)

    async def _release_checkpoints(self, key: Key) -> float | None:
        """Let go of the Checkpoints of this missing job, and fail its open requests to save.

        Returns:
            Seconds after which a younger request fails, or None if there is none.

        Our finalizer would block the deletion of the Checkpoints and of their namespace forever. Where there
        is data to delete, a pod does it (loop/deletions.py). Raises HoldfastError where a call fails; the
        queue then retries the key.
        """
        known = self._cache.checkpoints.of(key.namespace, key.name)
        for checkpoint in ends.hanging(known):
            if not ends.has_data(checkpoint):
                await self._effects.release_checkpoint(
                    key.namespace, checkpoint.name, checkpoint.uid
                )
        now, waits = self._now(), False
        for checkpoint in [c for c in known if c.id is None][:WRITES_PER_PASS]:
            note = unsaved(checkpoint, now)
            if note is not None:
                status = moved(checkpoint, CheckpointPhase.FAILED, now, *note)
                await self._cluster.write_status(checkpoint, status)
            waits |= note is None and checkpoint.status.phase is not CheckpointPhase.FAILED
        return SETTLE_SECONDS if waits else None

    async def _record_imports(self, key: Key) -> None:
        """Write the first status of Checkpoints that were imported for this job, which may not exist.

        Raises HoldfastError where a call fails; the queue then retries the key. An object that has changed
        meanwhile causes an event, and with it another pass.
        """
        found = self._cache.checkpoints.of(key.namespace, key.name)
        for checkpoint in [c for c in found if c.awaits_record][:WRITES_PER_PASS]:
            status = imported(checkpoint, self._now())
            if status is not None:
                with suppress(ConflictError):
                    await self._cluster.write_status(checkpoint, status)

    async def _record_losses(self, key: Key) -> None:
        """Write whether the Checkpoints of jobs that are gone can be restored.

        Those of a former job under the name of a present one are among them. Raises HoldfastError.
        """
        namespace, name, now = key.namespace, key.name, self._now()
        living = {job.uid for job in self._cache.jobs.of_name(namespace, name)}
        left = [
            (checkpoint, uid, status)
            for checkpoint in self._cache.checkpoints.of(namespace, name)
            if (uid := checkpoint.status.job_uid) is not None and uid not in living
            if (status := without_job(checkpoint, self._store_of(checkpoint), now)) is not None
        ]
        nodes = {uid for checkpoint, uid, _ in left if not checkpoint.persisted}
        kept = {
            uid
            for uid in nodes
            if self._cache.pods.workers(namespace, uid)
            or await self._cluster.job_exists(namespace, name, uid)
        }  # a job that exists all the same cannot be parsed, or the copies lag
        due = [(c, status) for c, uid, status in left if c.persisted or uid not in kept]
        for checkpoint, status in due[:WRITES_PER_PASS]:
            with suppress(ConflictError):
                await self._cluster.write_status(checkpoint, status)

    def _store_of(self, checkpoint: Checkpoint) -> StoreView | None:
        store = self._cache.stores.get(checkpoint.namespace, checkpoint.status.store or "")
        return None if store is None or store.deleting else store_view(store)

    def _incomplete(self, key: Key, job: Gang, applied: Applied) -> IncompletePass:
        """Log what was not carried out and return the error that the caller raises.

        The error makes the queue retry the key after a growing, jittered delay. A complete pass resets
        the delay, and an event starts the next pass without waiting for it.
        """
        if applied.not_gone:
            names = ", ".join(applied.not_gone)
            text = f"the API server has pods that the watch does not show: {names}. They are listed again"
            self._log_changes.info(f"{key} pods", text, **log_fields(job))
            self._cache.relist_pods()
        for failed in applied.failed:
            verb = described(failed.action).rpartition(" ")[
                0
            ]  # the same failure of many pods is one line
            self._log_changes.warning(f"{key} {verb}", f"{failed}", **log_fields(job))
        return IncompletePass(failed=bool(applied.failed))

    def _pass_failed(self, key: Key, error: Exception) -> None:
        if isinstance(error, IncompletePass) and not error.failed:
            return  # a lagging watch or another writer is not an error
        self._metrics.failed_passes.labels(key.kind).inc()
        if isinstance(error, IncompletePass):
            return  # _incomplete has logged each failed action
        if isinstance(error, HoldfastError):
            self._log_changes.warning(f"pass {key}", f"{key}: {error}")
        else:
            logs.failure(f"{key}: pass failed", error)

    # ------------------------------------------------------------------ without an event

    async def _report(self) -> None:
        """Every TICK_SECONDS, update the gauges."""
        while True:
            await self._clock.sleep(TICK_SECONDS)
            now = self._clock.monotonic()
            for reflector in self._cache.reflectors:
                if reflector.last_contact is not None:
                    age = now - reflector.last_contact
                    self._metrics.watch_age_seconds.labels(reflector.collection.name).set(age)
            self._report_leases(self._cache.leases)
            self._metrics.foreign_pods.set(self._cache.pods.foreign_count())
            hidden = self._cache.unreadable_objects()
            self._metrics.unreadable(Counter(u.kind for u in hidden))

    def _report_leases(self, leases: NodeLeases) -> None:
        late = leases.late_count
        self._metrics.leases_in_doubt.set(late or 0)
        if late is not None:
            text = (
                f"{late} of {leases.count} node leases are late at the same time, so the API server or "
                "this operator is slow. Until most are renewed, no node counts as lost for its lease"
            )
            self._log_changes.warning_once("leases", text)
        elif self._log_changes.forget("leases"):
            logs.info("most node leases are renewed again, and show again which nodes are lost")

    async def _sweep(self) -> None:
        """Every SWEEP_SECONDS, delete authorities of jobs that no longer exist and queue all stores.

        Jobs may have been deleted while no operator ran.
        """
        while True:
            try:
                await self._certificates.sweep(self._cache.job_uids())
            except HoldfastError as error:
                self._log_changes.warning(
                    "sweep",
                    (
                        "deleting the certificate authorities of deleted jobs "
                        f"failed, it is tried again later: {error}"
                    ),
                )
            for store in self._cache.stores.all():
                self._queue.add(store_key(store.namespace, store.name))
            await self._clock.sleep(SWEEP_SECONDS)

    def _job_gone(self, job: Gang | Unreadable) -> None:
        self._forget(job)
        if self._leadership.leads:  # otherwise the leader does it, or the sweep of the next leader
            self._spawn(self._forget_authority(JobUid(job.uid)))

    def _forget(self, job: Gang | Unreadable) -> None:
        """Drop what this process knows of a job that is gone."""
        uid = JobUid(job.uid)
        self._memory.pop(uid, None)
        self._templates.forget(uid)
        self._present.forget(uid)
        self._sidecars.forget(uid)
        self._reports.forget(uid)
        self._owners.forget(uid)
        self._metrics.forget(job.namespace, job.name)
        self._log_changes.forget(str(gang_key(job)))
        self._log_changes.forget(f"{gang_key(job)} pods")
        self._log_changes.forget(f"{gang_key(job)} deletes")

    async def _forget_authority(self, uid: JobUid) -> None:
        try:
            await self._certificates.forget(uid)
        except HoldfastError as error:
            logs.warning(
                f"deleting the certificate authority of job {uid} failed, the sweep tries "
                f"again: {error}"
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def decided(observed: Observed, now: Now) -> Decision:
    """Return what `decide` returns."""
    if len(observed.pods) + len(observed.checkpoints) < LARGE_JOB_OBJECTS:
        return decide(observed, now)
    return await asyncio.to_thread(decide, observed, now)


async def release_pods(cache: ClusterCache, cluster: Cluster, key: Key) -> None:
    """Remove Kueue's finalizer from deleted pods whose job has no pass: it is gone, or cannot be parsed.

    The pass of the job does this for all other pods (scheduling.due). Nothing else is decided about pods of
    jobs that are gone, because the garbage collector deletes them. Raises HoldfastError where a call
    fails; the queue then retries the key.
    """
    for action in leaving(cache.pods_without_pass(key)):
        await cluster.release_pod(key.namespace, action.name, action.uid, ends_group=False)
