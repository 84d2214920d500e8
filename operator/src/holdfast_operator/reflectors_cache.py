"""The reflectors of everything that the operator watches, and the look-ups that a pass needs.

Reads only: what is here is as new as the newest event. A change becomes a key for the work queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from holdfast_core.api import GROUP, VERSION, Checkpoint, CheckpointStore, TrainingJob
from holdfast_core.clock import Clock
from holdfast_core.ids import JobUid
from holdfast_operator import labels
from holdfast_operator.expectations import (
    Expectations,
    created,
    deleted,
    is_at_least,
    written,
)
from holdfast_operator.keys import Key, job_key, store_key
from holdfast_operator.kube_api import KubeApi
from holdfast_operator.model import CheckpointView, JobView, NodeView, PodView
from holdfast_operator.node_leases import NodeLeases
from holdfast_operator.reflectors import Collection, Reflector
from holdfast_operator.reflectors_records import (
    CheckpointRecordItem,
    Lease,
    ManagedPod,
    ProbePod,
    StoreRecord,
    WorkerPod,
    read_checkpoint,
    read_job,
    read_lease,
    read_node,
    read_pod,
    read_store,
)

T = TypeVar("T")

LEASES_PATH = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class ClusterCache:
    """Open `run` as a task; look things up once `wait_synced` has returned."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        namespaces: tuple[str, ...],
        expectations: Expectations,
        enqueue: Callable[[Key], None],
        on_job_gone: Callable[[JobView], None],
    ) -> None:
        self._clock = clock
        self._expectations = expectations
        self._enqueue = enqueue
        self._on_job_gone = on_job_gone
        self._jobs: dict[tuple[str, str], JobView] = {}
        self._written: dict[JobUid, str] = {}
        self._pods: dict[JobUid, dict[str, WorkerPod]] = {}
        self._probes: dict[tuple[str, str], dict[str, ProbePod]] = {}
        self._checkpoints: dict[tuple[str, str], CheckpointView] = {}
        self._checkpoints_of: dict[tuple[str, str], dict[str, CheckpointView]] = {}
        self._stores: dict[tuple[str, str], StoreRecord] = {}
        self._nodes: dict[str, NodeView] = {}
        self.leases = NodeLeases()
        self.reflectors: list[Reflector[Any]] = []

        watch = self._watch
        ours = f"/apis/{GROUP}/{VERSION}"
        mine = f"{labels.MANAGED_BY}={labels.MANAGED_BY_VALUE}"
        for scope in [f"/namespaces/{n}" for n in namespaces] or [""]:
            watch(api, "jobs", f"{ours}{scope}/{TrainingJob.PLURAL}", read_job, self._job)
            watch(
                api,
                "checkpoints",
                f"{ours}{scope}/{Checkpoint.PLURAL}",
                read_checkpoint,
                self._ckpt,
            )
            watch(api, "stores", f"{ours}{scope}/{CheckpointStore.PLURAL}", read_store, self._store)
            watch(api, "pods", f"/api/v1{scope}/pods", read_pod, self._pod, mine)
        watch(api, "nodes", "/api/v1/nodes", read_node, self._node)
        self._lease_watch = watch(api, "leases", LEASES_PATH, read_lease, self._lease)

    def _watch(
        self,
        api: KubeApi,
        name: str,
        path: str,
        parse: Callable[[Mapping[str, Any]], T | None],
        on_change: Callable[[T | None, T | None], None],
        selector: str | None = None,
    ) -> Reflector[T]:
        collection = Collection(name, path, selector)
        reflector = Reflector(api, collection, parse, on_change, self._clock)
        self.reflectors.append(reflector)
        return reflector

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for reflector in self.reflectors:
                group.create_task(reflector.run())

    async def wait_synced(self) -> None:
        for reflector in self.reflectors:
            await reflector.synced.wait()

    # ------------------------------------------------------------------ look-ups

    def job(self, namespace: str, name: str) -> JobView | None:
        return self._jobs.get((namespace, name))

    def jobs(self) -> Iterable[JobView]:
        return tuple(self._jobs.values())

    def pods(self, job_uid: JobUid) -> tuple[PodView, ...]:
        return tuple(p.view for p in self._pods.get(job_uid, {}).values())

    def jobs_on_node(self, node: str) -> set[Key]:
        return {
            job_key(p.namespace, p.job)
            for pods in self._pods.values()
            for p in pods.values()
            if p.view.node == node
        }

    def nodes_in_use(self) -> set[str]:
        """Nodes that have worker pods."""
        pods = (p.view.node for pods in self._pods.values() for p in pods.values())
        return {node for node in pods if node is not None}

    def checkpoints(self, namespace: str, job: str) -> tuple[CheckpointView, ...]:
        return tuple(self._checkpoints_of.get((namespace, job), {}).values())

    def checkpoint(self, namespace: str, name: str) -> CheckpointView | None:
        return self._checkpoints.get((namespace, name))

    def store(self, namespace: str, name: str) -> StoreRecord | None:
        return self._stores.get((namespace, name))

    def stores(self) -> tuple[StoreRecord, ...]:
        return tuple(self._stores.values())

    def jobs_of_store(self, namespace: str, store: str) -> tuple[JobView, ...]:
        return tuple(
            j for j in self._jobs.values() if j.namespace == namespace and j.spec.store == store
        )

    def probe_pods(self, namespace: str, store: str) -> tuple[ProbePod, ...]:
        return tuple(self._probes.get((namespace, store), {}).values())

    def node(self, name: str) -> NodeView | None:
        return self._nodes.get(name)

    @property
    def lease_contact(self) -> float | None:
        """When the watch of node leases last delivered anything; monotonic seconds."""
        return self._lease_watch.last_contact

    # ------------------------------------------------------------------ our own writes

    def expect_created(self, job_uid: JobUid, uid: str) -> None:
        if uid not in self._pods.get(job_uid, {}):
            self._expectations.expect(job_uid, created(uid), self._clock.monotonic())

    def expect_deleted(self, job_uid: JobUid, uid: str) -> None:
        pod = self._pods.get(job_uid, {}).get(uid)
        if pod is not None and not pod.view.terminating:
            self._expectations.expect(job_uid, deleted(uid), self._clock.monotonic())

    def expect_written(self, job: JobView, resource_version: str) -> None:
        seen = self._jobs.get((job.namespace, job.name))
        if seen is None or is_at_least(seen.resource_version, resource_version):
            return
        self._written[job.uid] = resource_version
        self._expectations.expect(job.uid, written(resource_version), self._clock.monotonic())

    # ------------------------------------------------------------------ changes

    def _job(self, old: JobView | None, new: JobView | None) -> None:
        job = new or old
        if job is None:
            return
        name = (job.namespace, job.name)
        if new is not None:
            self._jobs[name] = new
            expected = self._written.get(new.uid)
            if expected is not None and is_at_least(new.resource_version, expected):
                del self._written[new.uid]
                self._expectations.met(new.uid, written(expected))
        elif old is not None:
            known = self._jobs.get(name)
            if known is not None and known.uid == old.uid:
                del self._jobs[name]
            self._written.pop(old.uid, None)
            self._on_job_gone(old)
        self._enqueue(job_key(*name))
        if job.spec.store is not None and (old is None or new is None):
            self._enqueue(store_key(job.namespace, job.spec.store))

    def _pod(self, old: ManagedPod | None, new: ManagedPod | None) -> None:
        pod = new or old
        if isinstance(pod, ProbePod):
            probes = self._probes.setdefault((pod.namespace, pod.store), {})
            if isinstance(new, ProbePod):
                probes[new.uid] = new
            else:
                probes.pop(pod.uid, None)
            self._enqueue(store_key(pod.namespace, pod.store))
        elif isinstance(pod, WorkerPod):
            self._worker_pod(pod, gone=new is None)

    def _worker_pod(self, pod: WorkerPod, *, gone: bool) -> None:
        pods = self._pods.setdefault(pod.job_uid, {})
        uid = pod.view.uid
        if gone:
            pods.pop(uid, None)
            if not pods:
                del self._pods[pod.job_uid]
        else:
            pods[uid] = pod
        self._expectations.met(pod.job_uid, created(uid))
        if gone or pod.view.terminating:
            self._expectations.met(pod.job_uid, deleted(uid))
        self._enqueue(job_key(pod.namespace, pod.job))

    def _ckpt(self, old: CheckpointRecordItem | None, new: CheckpointRecordItem | None) -> None:
        item = new or old
        if item is None:
            return
        view = item.view
        known = self._checkpoints_of.setdefault((item.namespace, view.job), {})
        if new is not None:
            self._checkpoints[item.namespace, view.name] = view
            known[view.name] = view
        elif known.get(view.name) is None or known[view.name].uid == view.uid:
            self._checkpoints.pop((item.namespace, view.name), None)
            known.pop(view.name, None)
        self._enqueue(job_key(item.namespace, view.job))
        for job in self._jobs.values():
            if job.namespace == item.namespace and job.spec.restore_from == view.name:
                self._enqueue(job_key(job.namespace, job.name))

    def _store(self, old: StoreRecord | None, new: StoreRecord | None) -> None:
        store = new or old
        if store is None:
            return
        name = (store.namespace, store.name)
        if new is not None:
            self._stores[name] = new
        elif name in self._stores and self._stores[name].uid == store.uid:
            del self._stores[name]
        self._enqueue(store_key(*name))
        for job in self.jobs_of_store(*name):
            self._enqueue(job_key(job.namespace, job.name))

    def _node(self, old: NodeView | None, new: NodeView | None) -> None:
        if new is not None:
            self._nodes[new.name] = new
            changed = new.name
        elif old is not None:
            self._nodes.pop(old.name, None)
            changed = old.name
        else:
            return
        if old is None or new is None or (old.ready, old.labels) != (new.ready, new.labels):
            for key in self.jobs_on_node(changed):
                self._enqueue(key)

    def _lease(self, old: Lease | None, new: Lease | None) -> None:
        if new is not None:
            self.leases.observe(new.node, new.renewed, self._clock.monotonic())
        elif old is not None:
            self.leases.forget(old.node)
