"""One operator process over a FakeCluster.

It runs the product's reflectors, caches, observer, decisions, effects, certificates and writes against an
in-memory API. HTTP, the work queue and the network of the sidecars are left out. A new SimulatedOperator
starts with empty memory, as a restarted process does. `Trouble` makes watches stale, loses replies and
causes write conflicts, from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from tests.support.operator.builders import NAMESPACE, now
from tests.support.operator.fake_api import FakeApi
from tests.support.operator.fake_cluster import FakeCluster
from tests.support.operator.toy_link import ToyLink, Trouble, calm

from holdfast_core.api import Gang, TrainingJob
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid, Worker
from holdfast_operator.apply.apply import Applied, JobEffects, Present, apply, memory_after
from holdfast_operator.apply.reports import Reports
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide.decide import decide
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster, Events, Subject
from holdfast_operator.loop.controller import release_pods
from holdfast_operator.loop.observe import Observer, confirm
from holdfast_operator.model.actions import Decision, EmitEvent, EventKind
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import JobMemory, Observed, PodView, Unreadable
from holdfast_operator.model.ownership import job_key, pod_source
from holdfast_operator.sidecars.certificates import Certificates
from holdfast_operator.watch.cache import ClusterCache

__all__ = ["OPERATOR_NAMESPACE", "SimulatedOperator", "Trouble", "calm"]

OPERATOR_NAMESPACE = "holdfast-system"
SIDECAR = SidecarSettings("example/sidecar:1")
LEAVING_TAINTS = frozenset({"example.com/spot-notice"})
"""Setting of the installation: keys of taints that say that a node will be taken away soon."""
ALWAYS_FRESH = frozenset({"leases", "nodes"})
"""Plurals that are never stale. The operator reads a Lease directly before it treats it as not renewed, so
a stale one has no effect."""


class SimulatedOperator:
    def __init__(self, cluster: FakeCluster, trouble: Trouble | None = None) -> None:
        self.cluster = cluster
        self.memory = JobMemory()
        self.decisions: list[Decision] = []
        clock = _ClusterClock(cluster)
        self._clock = clock
        self._api = _TroubledApi(cluster)
        kube = Cluster(self._api)
        self._kube = kube
        events = _RecordedEvents(kube, clock)
        self._events = events
        self.cache = ClusterCache(self._api, clock, (NAMESPACE,), lambda key: None, self._job_gone)
        self.certificates = Certificates(kube, OPERATOR_NAMESPACE)
        self.link = ToyLink(cluster, calm())
        self.trouble = calm() if trouble is None else trouble
        self.metrics = Metrics()
        self._present = Present(clock)
        self._effects = JobEffects(
            kube, self.cache, self.link, self.certificates, events, self.metrics, self._present
        )
        self._observer = Observer(
            self.cache, self.link, self._present, SIDECAR, clock, leaving_taints=LEAVING_TAINTS
        )
        self._reports = Reports(kube, events, clock)
        self.stuck: set[str] = set()
        """Plurals whose watch delivers no further events."""
        self._gone: list[Gang | Unreadable] = []
        self._listed: dict[str, int] = {}
        """The change counter of its plural at the last list of each collection."""
        self._due_at: float | None = cluster.seconds
        """Time of the next pass if no event comes before. None: only an event causes one."""

    @property
    def trouble(self) -> Trouble:
        return self.link.trouble

    @trouble.setter
    def trouble(self, trouble: Trouble) -> None:
        self.link.trouble = self._api.trouble = trouble

    def on_write(self, call: Callable[[], None]) -> None:
        """Call `call` after each write to the API, before the operator receives the reply.

        An exception that `call` raises ends the simulated process at that point.
        """
        self._api.on_write = call

    @property
    def events(self) -> list[EmitEvent]:
        """Every Event that was emitted."""
        return self._events.emitted

    async def run_due_pass(self) -> None:
        """Run a pass if the controller of a real operator would: after an event, or when the next is due.

        A renewed lease is no event.
        """
        due = self._due_at is not None and self.cluster.seconds >= self._due_at
        if due or self._has_events():
            await self.run_pass()

    def _has_events(self) -> bool:
        """Return whether a watch or a sidecar has news that the last pass did not read."""
        self.cluster.publish()
        changes = self.cluster.api.changes
        for reflector in self.cache.reflectors:
            plural = reflector.collection.path.rpartition("/")[2]
            known = self._listed.get(reflector.collection.name)
            if plural != "leases" and plural not in self.stuck and known != changes[plural]:
                return True
        return self.link.has_news(self.cluster.uid)

    async def run_pass(self) -> Applied:
        """Run one pass: read the cluster, observe, decide and apply."""
        self._due_at = self.cluster.seconds
        observed = await self.observe()
        await self._release_pods()
        if observed is None:
            return Applied()
        job = observed.job
        if self.cache.wait_seconds(job.uid) is not None:
            return Applied()  # the watch has not delivered this operator's writes yet
        decision = decide(observed, now(self.cluster.seconds))
        self.decisions.append(decision)
        applied = await apply(decision, observed, self._effects)
        self.memory = memory_after(decision, observed, applied)
        if applied.complete:
            self.link.acted_on(job.uid, decision.acted_version)
            after = decision.requeue_after_seconds
            self._due_at = None if after is None else self.cluster.seconds + after
        return applied

    async def observe(self) -> Observed | None:
        """Update the caches and return what the operator observes, or None if there is no readable job.

        A watch may lag but never goes back. The first list of each plural is always fresh.
        """
        self.cluster.publish()
        for reflector in self.cache.reflectors:
            plural = reflector.collection.path.rpartition("/")[2]
            changes = self.cluster.api.changes[plural]
            name = reflector.collection.name
            known = self._listed.get(name)
            if plural in self.stuck:
                continue
            fresh = known is None or plural in ALWAYS_FRESH
            if fresh or not self.trouble.strikes(self.trouble.stale_read):
                if known != changes or plural in ALWAYS_FRESH:
                    await reflector.relist()
                self._listed[name] = changes
        await self._forget_gone()
        name = self.cluster.job["metadata"]["name"]
        job = self.cache.jobs.get(job_key(NAMESPACE, name))
        if job is None:
            hidden = self.cache.unreadable.get(TrainingJob.KIND, NAMESPACE, name)
            if hidden is not None:
                try:
                    await self._reports.report(hidden)
                except HoldfastError:
                    pass  # a conflict; the next pass reports it
            return None
        self._reports.is_read(job.uid)
        self.cache.leases.compare(self._clock.monotonic(), self.cache.lease_watch.contact_since)
        for node in self._observer.unproven_nodes(
            job, self.cache.pods.workers(job.namespace, job.uid)
        ):
            await confirm(node, self.cache.leases, self._kube, self._clock)
        return self._observer.observe(job, self.memory)

    async def _release_pods(self) -> None:
        name = self.cluster.job["metadata"]["name"]
        try:
            await release_pods(self.cache, self._kube, job_key(NAMESPACE, name))
        except HoldfastError:
            pass  # the queue retries the key

    async def sweep(self) -> None:
        """Delete certificates of jobs that are gone, as a real operator does at its start and every hour."""
        await self.certificates.sweep(self.cache.job_uids())

    def worker_pod(self, worker: int) -> PodView | None:
        """Return the worker's current pod by the job's status, or None if the cluster does not run it."""
        job = TrainingJob.from_dict(self.cluster.job)
        if worker >= len(job.status.members):
            return None
        name = pod_source(job).identity(Worker(worker), job.status.members[worker])
        pod = self.cluster.pods.get(name)
        return None if pod is None else pod.view

    def _job_gone(self, job: Gang | Unreadable) -> None:
        self._gone.append(job)

    async def _forget_gone(self) -> None:
        while self._gone:
            uid = JobUid(self._gone.pop().uid)
            self.memory = JobMemory()
            self._present.forget(uid)
            self.link.forget(uid)
            self._reports.forget(uid)
            try:
                await self.certificates.forget(uid)
            except ApiError:
                pass  # the reply was lost; the sweep retries


class _ClusterClock:
    """Clock that shows the cluster's ticks."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def monotonic(self) -> float:
        return float(self._cluster.seconds)

    def utc_now(self) -> datetime:
        return now(self._cluster.seconds).utc

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("nothing of a SimulatedOperator waits")


class _RecordedEvents(Events):
    """Recorder of all Events, including those that the rate limit would drop."""

    def __init__(self, cluster: Cluster, clock: _ClusterClock) -> None:
        super().__init__(cluster, clock)
        self.emitted: list[EmitEvent] = []

    async def emit(self, subject: Subject, kind: str, reason: str, message: str) -> None:
        self.emitted.append(EmitEvent(EventKind(kind), reason, message))


class _TroubledApi(FakeApi):
    """One process's connection to the cluster's API, on which writes conflict and replies are lost."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__()
        self._cluster = cluster
        self.trouble = calm()
        self.on_write: Callable[[], None] = lambda: None

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        return await self._cluster.api.get(path, params)

    async def post(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        return self._reply(await self._cluster.api.post(path, body, params))

    async def patch(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        if "/trainingjobs/" in path and self.trouble.strikes(self.trouble.conflict):
            self._cluster.touch_job()
        return self._reply(await self._cluster.api.patch(path, body, params))

    async def patch_strategic(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        return self._reply(await self._cluster.api.patch_strategic(path, body, params))

    async def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Any:
        return self._reply(await self._cluster.api.delete(path, options))

    def _reply(self, answer: Any) -> Any:
        self.on_write()
        if self.trouble.strikes(self.trouble.lost_reply):
            raise ApiError(None, "", "connection reset before the reply came")
        return answer
