"""The reflectors of all objects that the operator watches, and the copies that a pass looks up.

The cache only reads from the API and is as new as the newest event. Each change adds the keys of the
affected jobs and stores to the work queue.

The cache also knows which pods the operator created or deleted that the reflectors have not delivered yet. A
pass on older reads would repeat these writes. Repeating is harmless, because names are deterministic, but
waiting saves the calls. An expectation that is never met expires, and the next pass acts on what the
reflectors show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from holdfast_core.api import (
    GANGS,
    GROUP,
    VERSION,
    Checkpoint,
    CheckpointAdoption,
    CheckpointStore,
    Gang,
    TrainingJob,
)
from holdfast_core.clock import Clock
from holdfast_core.ids import JobUid
from holdfast_operator.kube.api import KubeApi
from holdfast_operator.model import labels
from holdfast_operator.model.job import NodeView, PodView, Unreadable, store_view
from holdfast_operator.model.ownership import Key, KeyKind, gang_key, job_key, store_key
from holdfast_operator.watch.indexes import Index, JobIndex, PodIndex, key_of, unreadable_index
from holdfast_operator.watch.nodes import NodeCache, NodeLeases
from holdfast_operator.watch.records import (
    Lease,
    ManagedPod,
    WorkerPod,
    node_view,
    read_adopted_pod,
    read_lease,
    read_pod,
)
from holdfast_operator.watch.reflector import Collection, Reflector, Timings, is_at_least

EXPIRE_SECONDS = 5.0
"""Time after which a pass no longer waits for the watch to deliver a write of the operator."""

T = TypeVar("T")

STALLED_SECONDS = 180.0
"""Time without a sign of life after which a reflector is stalled. Its longest wait for one request is the
75 s of silence that it accepts from a watch."""
NODES_PATH = "/api/v1/nodes"
LEASES_PATH = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class ClusterCache:
    """Copies of all watched objects.

    Start `run` as a task. Look-ups are valid when `wait_synced` has returned.
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        namespaces: tuple[str, ...],
        enqueue: Callable[[Key], None],
        on_job_gone: Callable[[Gang | Unreadable], None],
        timings: Timings | None = None,
    ) -> None:
        self._clock = clock
        self._expected: dict[JobUid, dict[str, tuple[bool, float]]] = {}
        """Pods that were created (True) or deleted and when that expires, by uids of job and pod."""
        self._enqueue = enqueue
        self._on_job_gone = on_job_gone
        self.jobs = JobIndex()
        self.pods = PodIndex()
        self.unreadable = unreadable_index()
        """Objects of our own kinds that exist and cannot be parsed."""
        self.checkpoints: Index[Checkpoint] = Index(
            lambda c: (c.namespace, c.name), lambda c: [(c.namespace, c.job)]
        )
        """Checkpoints by namespace and name, and by namespace and name of their job."""
        self.stores: Index[CheckpointStore] = Index(lambda s: (s.namespace, s.name))
        self.nodes = NodeCache()
        self.leases = NodeLeases()
        self.reflectors: list[Reflector[Any]] = []
        self._own_watches: tuple[Reflector[Any], ...] = ()

        def watch(
            collection: Collection,
            parse: Callable[[Mapping[str, Any]], T | None],
            on_change: Callable[[T | Unreadable | None, T | Unreadable | None], None],
        ) -> Reflector[T]:
            reflector = Reflector(api, collection, parse, on_change, clock, timings)
            self.reflectors.append(reflector)
            return reflector

        ours = f"/apis/{GROUP}/{VERSION}"
        mine = f"{labels.MANAGED_BY}={labels.MANAGED_BY_VALUE}"
        adopted = f"{labels.ADOPT},{labels.MANAGED_BY}!={labels.MANAGED_BY_VALUE}"
        for scope in [f"/namespaces/{n}" for n in namespaces] or [""]:
            jobs, adoptions, checkpoints, stores = (
                Collection(name, f"{ours}{scope}/{kind.PLURAL}", kind=kind.KIND)
                for name, kind in (
                    ("jobs", TrainingJob),
                    ("adoptions", CheckpointAdoption),
                    ("checkpoints", Checkpoint),
                    ("stores", CheckpointStore),
                )
            )
            self._own_watches += (
                watch(jobs, TrainingJob.from_dict, self._job),
                watch(adoptions, CheckpointAdoption.from_dict, self._job),
                watch(checkpoints, Checkpoint.from_dict, self._ckpt),
                watch(stores, CheckpointStore.from_dict, self._store),
            )
            own = Collection("pods", f"/api/v1{scope}/pods", mine, "Pod")
            theirs = Collection("adopted-pods", f"/api/v1{scope}/pods", adopted, "Pod")
            watch(own, read_pod, self._pod)
            watch(theirs, read_adopted_pod, self._pod)
        nodes = Collection("nodes", NODES_PATH, kind="Node")
        self.node_watch = watch(nodes, node_view, self._node)
        leases = Collection("leases", LEASES_PATH, kind="Lease")
        self.lease_watch = watch(leases, read_lease, self._lease)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for reflector in self.reflectors:
                group.create_task(reflector.run())

    async def wait_synced(self) -> None:
        """Wait until each reflector has completed its first LIST."""
        for reflector in self.reflectors:
            await reflector.synced.wait()

    def relist_pods(self) -> None:
        """List the pods again soon, because the copies lack one that exists."""
        for reflector in self.reflectors:
            if reflector.collection.kind == "Pod":
                reflector.relist_soon()

    def stalled_watches(self) -> list[str]:
        """Return the names of reflectors that neither receive anything nor fail any more.

        An API server that is away or refuses requests stalls no reflector: its requests fail.
        """
        since = self._clock.monotonic() - STALLED_SECONDS
        return [r.collection.name for r in self.reflectors if r.last_turn < since]

    def enqueue_all(self) -> None:
        """Add the keys of all objects, and of missing jobs that have Checkpoints or pods."""
        for job in self.jobs.all():
            self._enqueue(gang_key(job))
        for hidden in self.unreadable.all():
            if hidden.kind == CheckpointStore.KIND:
                self._enqueue(store_key(hidden.namespace, hidden.name))
            elif hidden.kind != Checkpoint.KIND:
                self._enqueue(gang_key(hidden))
        for store in self.stores.all():
            self._enqueue(store_key(store.namespace, store.name))
        for group in self.checkpoints.groups():
            namespace, name = map(str, group)
            if not self.jobs.of_name(namespace, name):
                self._enqueue(job_key(namespace, name))
        for key in self.pods.job_keys():
            if self.jobs.get(key) is None:
                self._enqueue(key)

    # ------------------------------------------------------------------ look-ups

    def is_known(self, uid: str, resource_version: str) -> bool:
        """Return whether the copy of an object of our own kinds is of this version or a newer one."""
        found = (r.items.get(uid) for r in self._own_watches)
        return any(
            not isinstance(item, Unreadable | None)
            and is_at_least(item.resource_version, resource_version)
            for item in found
        )

    def job_uids(self) -> set[JobUid]:
        """Return the uids of all jobs that exist, including those that cannot be parsed."""
        kinds = [kind.KIND for kind in GANGS]
        hidden = {JobUid(u.uid) for u in self.unreadable.all() if u.kind in kinds}
        return hidden | {j.uid for j in self.jobs.all()}

    def unreadable_objects(self) -> tuple[Unreadable, ...]:
        """Return all objects of our own kinds, and pods of jobs and stores, that cannot be parsed."""
        return (*self.unreadable.all(), *self.pods.unreadable())

    def pods_without_pass(self, key: Key) -> tuple[PodView, ...]:
        """Return the worker pods of TrainingJobs of this key that are deleted or cannot be parsed."""
        if key.kind is not KeyKind.JOB:
            return ()
        job = self.jobs.get(key)
        return self.pods.of_other_jobs(key, None if job is None else job.uid)

    # ------------------------------------------------------------------ our own writes

    def expect(self, job: Gang, pod_uid: str, *, created: bool) -> None:
        """Record that the operator has created the pod, or has deleted it."""
        until = self._clock.monotonic() + EXPIRE_SECONDS
        self._expected.setdefault(job.uid, {})[pod_uid] = created, until
        self._settle(job.uid, pod_uid)

    def wait_seconds(self, job_uid: JobUid) -> float | None:
        """Return the seconds until the last write that the copies do not show yet expires, or None."""
        for uid in list(self._expected.get(job_uid, ())):
            self._settle(job_uid, uid)
        last = max((until for _, until in self._expected.get(job_uid, {}).values()), default=None)
        return None if last is None else last - self._clock.monotonic()

    def _settle(self, job_uid: JobUid, pod_uid: str) -> None:
        """Forget the write to a pod if the copies show it, or if it has expired.

        A change of one pod settles this pod alone: a gang of thousands is created in one pass.
        """
        expected = self._expected.get(job_uid, {})
        if pod_uid not in expected:
            return
        created, until = expected[pod_uid]
        pod = self.pods.get(pod_uid)
        ends = pod is None or (isinstance(pod, WorkerPod) and pod.view.terminating)
        if until <= self._clock.monotonic() or (pod is not None if created else ends):
            del expected[pod_uid]

    def take_job(self, job: Gang, reply: Mapping[str, Any]) -> None:
        """Take a job from the reply to a write of its status, which the watch delivers later."""
        seen = self.jobs.get(gang_key(job))
        if seen is None or is_at_least(seen.resource_version, reply["metadata"]["resourceVersion"]):
            return
        for reflector in self._own_watches:
            reflector.take(reply)

    # ------------------------------------------------------------------ changes

    def _take(
        self, index: Index[T], old: T | Unreadable | None, new: T | Unreadable | None
    ) -> None:
        """Take a change of an object of our own kinds into its index."""
        if isinstance(old, Unreadable):
            self.unreadable.drop(old)
        elif old is not None:
            index.drop(old)
        if isinstance(new, Unreadable):
            self.unreadable.put(new)
        elif new is not None:
            index.put(new)

    def _job(self, old: Gang | Unreadable | None, new: Gang | Unreadable | None) -> None:
        job = new or old
        if job is None:
            return
        self._take(self.jobs, old, new)
        if new is None:
            self._expected.pop(JobUid(job.uid), None)
            self._on_job_gone(job)
        self._enqueue(gang_key(job))
        self._enqueue_stores_of(old, new)

    def _enqueue_stores_of(
        self, old: Gang | Unreadable | None, new: Gang | Unreadable | None
    ) -> None:
        """Queue the store of a job that appeared or was deleted: a new job makes a probe due."""
        found = [j for j in (old, new) if not isinstance(j, Unreadable | None)]
        if len(found) == 1 and found[0].spec.store is not None:
            self._enqueue(store_key(found[0].namespace, found[0].spec.store))

    def _pod(
        self, old: ManagedPod | Unreadable | None, new: ManagedPod | Unreadable | None
    ) -> None:
        if old is not None:
            self.pods.drop(old)
        if new is not None:
            self.pods.put(new)
        for pod in (old, new):
            if isinstance(pod, WorkerPod):
                self._settle(pod.job_uid, pod.uid)  # a pod may come and go between two passes
        for key in {key_of(pod) for pod in (old, new) if pod is not None}:
            if key is not None:
                self._enqueue(key)

    def _ckpt(
        self, old: Checkpoint | Unreadable | None, new: Checkpoint | Unreadable | None
    ) -> None:
        self._take(self.checkpoints, old, new)
        subject = new or old
        if subject is None:
            return
        names = {item.job for item in (old, new) if item is not None and item.job is not None}
        for job in self.jobs.of(Checkpoint.KIND, subject.namespace, subject.name):
            self._enqueue(gang_key(job))
        for name in names:
            found = map(gang_key, self.jobs.of_name(subject.namespace, name))
            for key in tuple(found) or (job_key(subject.namespace, name),):
                self._enqueue(key)

    def _store(
        self, old: CheckpointStore | Unreadable | None, new: CheckpointStore | Unreadable | None
    ) -> None:
        store = new or old
        if store is None:
            return
        name = (store.namespace, store.name)
        self._take(self.stores, old, new)
        self._enqueue(store_key(*name))
        if _seen_by_jobs(old) == _seen_by_jobs(new):
            return  # a probe with the same result: thousands of jobs may use the store
        for job in self.jobs.of(CheckpointStore.KIND, *name):
            self._enqueue(gang_key(job))

    def _node(self, old: NodeView | Unreadable | None, new: NodeView | Unreadable | None) -> None:
        changed = self.nodes.change(old, new)
        for key in () if changed is None else self.pods.keys_on_node(changed):
            self._enqueue(key)

    def _lease(self, old: Lease | Unreadable | None, new: Lease | Unreadable | None) -> None:
        if isinstance(new, Lease):
            self.leases.observe(new.node, new.renewed, self._clock.monotonic())
        elif new is None and old is not None:
            self.leases.forget(old.node if isinstance(old, Lease) else old.name)


def _seen_by_jobs(store: CheckpointStore | Unreadable | None) -> object:
    """Return what passes over jobs see of a store."""
    if not isinstance(store, CheckpointStore):
        return store
    return store.uid, store.deleting, store_view(store)
