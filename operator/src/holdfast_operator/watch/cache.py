"""The reflectors of all objects that the operator watches, and the look-ups that a pass needs.

The cache only reads from the API and is as new as the newest event. Each change adds the keys of the
affected jobs and stores to the work queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import takewhile
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
from holdfast_operator.model.job import NodeView, PodView, Unreadable
from holdfast_operator.model.keys import Key, KeyKind, adoption_key, gang_key, job_key, store_key
from holdfast_operator.model.store_view import store_view
from holdfast_operator.watch.expectations import Expectations, created, deleted
from holdfast_operator.watch.node_leases import NodeLeases
from holdfast_operator.watch.pods import PodCache, key_of
from holdfast_operator.watch.records import (
    Lease,
    ManagedPod,
    ProbePod,
    WorkerPod,
    read_adopted_pod,
    read_lease,
    read_pod,
)
from holdfast_operator.watch.reflector import Collection, Reflector, Timings
from holdfast_operator.watch.sorted_index import SortedIndex
from holdfast_operator.watch.versions import is_at_least
from holdfast_operator.watch.views import node_view

T = TypeVar("T")
_NamedT = TypeVar("_NamedT", Checkpoint, CheckpointStore)

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
        expectations: Expectations,
        enqueue: Callable[[Key], None],
        on_job_gone: Callable[[Gang | Unreadable], None],
        timings: Timings | None = None,
    ) -> None:
        self._timings = timings
        self._clock = clock
        self._expectations = expectations
        self._enqueue = enqueue
        self._on_job_gone = on_job_gone
        self._jobs: dict[Key, Gang] = {}
        self._naming: dict[tuple[str, str, str], dict[Key, None]] = {}
        """Jobs by kind, namespace and name of the store and the Checkpoint that their spec names."""
        self._pods = PodCache()
        self._unreadable: dict[tuple[str, str, str], Unreadable] = {}
        """Objects of our own kinds that cannot be parsed, by kind, namespace and name."""
        self._unreadable_names: SortedIndex[tuple[str, str], str] = SortedIndex()
        """Their names by kind and namespace."""
        self._starts: SortedIndex[tuple[str, str], tuple[datetime, str]] = SortedIndex()
        """Creation and uid of the jobs that have no round yet, by namespace and name of their store."""
        self._checkpoints: dict[tuple[str, str], Checkpoint] = {}
        self._checkpoints_of: dict[tuple[str, str], dict[str, Checkpoint]] = {}
        self._stores: dict[tuple[str, str], CheckpointStore] = {}
        self._nodes: dict[str, NodeView] = {}
        self._hidden_nodes: set[str] = set()
        """Names of Node objects that cannot be parsed."""
        self.leases = NodeLeases()
        self.reflectors: list[Reflector[Any]] = []
        self._own_watches: tuple[Reflector[Any], ...] = ()
        self._pod_watches: tuple[Reflector[Any], ...] = ()

        watch = self._watch
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
                watch(api, jobs, TrainingJob.from_dict, self._job),
                watch(api, adoptions, CheckpointAdoption.from_dict, self._job),
                watch(api, checkpoints, Checkpoint.from_dict, self._ckpt),
                watch(api, stores, CheckpointStore.from_dict, self._store),
            )
            own = Collection("pods", f"/api/v1{scope}/pods", mine, "Pod")
            theirs = Collection("adopted-pods", f"/api/v1{scope}/pods", adopted, "Pod")
            self._pod_watches += (
                watch(api, own, read_pod, self._pod),
                watch(api, theirs, read_adopted_pod, self._pod),
            )
        nodes = Collection("nodes", NODES_PATH, kind="Node")
        self._node_watch = watch(api, nodes, node_view, self._node)
        leases = Collection("leases", LEASES_PATH, kind="Lease")
        self._lease_watch = watch(api, leases, read_lease, self._lease)

    def _watch(
        self,
        api: KubeApi,
        collection: Collection,
        parse: Callable[[Mapping[str, Any]], T | None],
        on_change: Callable[[T | Unreadable | None, T | Unreadable | None], None],
    ) -> Reflector[T]:
        reflector = Reflector(api, collection, parse, on_change, self._clock, self._timings)
        self.reflectors.append(reflector)
        return reflector

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
        for reflector in self._pod_watches:
            reflector.relist_soon()

    def stalled_watches(self) -> list[str]:
        """Return the names of reflectors that neither receive anything nor fail any more.

        An API server that is away or refuses requests stalls no reflector: its requests fail.
        """
        since = self._clock.monotonic() - STALLED_SECONDS
        return [r.collection.name for r in self.reflectors if r.last_turn < since]

    def enqueue_all(self) -> None:
        """Add the keys of all objects, and of missing jobs that have Checkpoints or pods."""
        for key in self._jobs:
            self._enqueue(key)
        for hidden in self._unreadable.values():
            if hidden.kind == CheckpointStore.KIND:
                self._enqueue(store_key(hidden.namespace, hidden.name))
            elif hidden.kind != Checkpoint.KIND:
                self._enqueue(gang_key(hidden))
        for name in self._stores:
            self._enqueue(store_key(*name))
        for namespace, job in self._checkpoints_of:
            if not self.name_is_used(namespace, job):
                self._enqueue(job_key(namespace, job))
        for key in self._pods.job_keys():
            if key not in self._jobs:
                self._enqueue(key)

    # ------------------------------------------------------------------ look-ups

    def job(self, key: Key) -> Gang | None:
        return self._jobs.get(key)

    def is_known(self, uid: str, resource_version: str) -> bool:
        """Return whether the copy of an object of our own kinds is of this version or a newer one."""
        found = (r.items.get(uid) for r in self._own_watches)
        return any(
            not isinstance(item, Unreadable | None)
            and is_at_least(item.resource_version, resource_version)
            for item in found
        )

    def same_name(self, job: Gang) -> Gang | None:
        """Return another gang of the same name in the job's namespace, or None."""
        keys = (job_key(job.namespace, job.name), adoption_key(job.namespace, job.name))
        found = (self._jobs.get(key) for key in keys)
        return next((j for j in found if j is not None and j.kind != job.kind), None)

    def name_is_used(self, namespace: str, name: str) -> bool:
        """Return whether a gang of either kind has this name."""
        keys = (job_key(namespace, name), adoption_key(namespace, name))
        return any(key in self._jobs for key in keys)

    def jobs(self) -> Iterable[Gang]:
        return tuple(self._jobs.values())

    @property
    def job_count(self) -> int:
        return len(self._jobs)

    def job_uids(self) -> set[JobUid]:
        """Return the uids of all jobs that exist, including those that cannot be parsed."""
        kinds = [kind.KIND for kind in GANGS]
        hidden = {JobUid(u.uid) for u in self._unreadable.values() if u.kind in kinds}
        return hidden | {j.uid for j in self._jobs.values()}

    def unreadable(self, kind: str, namespace: str, name: str) -> Unreadable | None:
        """Return the object of one of our own kinds if it exists and cannot be parsed."""
        return self._unreadable.get((kind, namespace, name))

    def unreadable_objects(self) -> tuple[Unreadable, ...]:
        """Return all objects of our own kinds, and pods of jobs and stores, that cannot be parsed."""
        return (*self._unreadable.values(), *self._pods.all_unreadable())

    def unreadable_checkpoints(self, namespace: str, prefix: str) -> tuple[Unreadable, ...]:
        """Return the Checkpoints that cannot be parsed and whose names begin with the prefix."""
        kind = Checkpoint.KIND
        names = self._unreadable_names.start_at((kind, namespace), prefix)
        found = takewhile(lambda name: name.startswith(prefix), names)
        return tuple(self._unreadable[kind, namespace, name] for name in found)

    def pods(self, job: Gang) -> tuple[PodView, ...]:
        """Return the worker pods whose controller is this job by uid, not another one of its name."""
        return self._pods.workers(job.namespace, job.uid)

    def pods_without_pass(self, key: Key) -> tuple[PodView, ...]:
        """Return the worker pods of TrainingJobs of this key that are deleted or cannot be parsed."""
        if key.kind is not KeyKind.JOB:
            return ()
        job = self._jobs.get(key)
        return self._pods.of_other_jobs(key, None if job is None else job.uid)

    def placeholders(self, job: Gang) -> tuple[PodView, ...]:
        """Return the placeholders of missing workers whose controller is this job by uid."""
        return self._pods.placeholders(job.namespace, job.uid)

    def unreadable_pods(self, namespace: str, owner_uid: str) -> tuple[Unreadable, ...]:
        return self._pods.unreadable(namespace, owner_uid)

    def foreign_pods(self) -> int:
        """Return the number of pods that carry our label but are no workers or probes."""
        return self._pods.foreign_count()

    def jobs_on_node(self, node: str) -> set[Key]:
        return self._pods.keys_on_node(node)

    def checkpoints(self, namespace: str, job: str) -> tuple[Checkpoint, ...]:
        return tuple(self._checkpoints_of.get((namespace, job), {}).values())

    def checkpoint(self, namespace: str, name: str) -> Checkpoint | None:
        return self._checkpoints.get((namespace, name))

    def store(self, namespace: str, name: str) -> CheckpointStore | None:
        return self._stores.get((namespace, name))

    def stores(self) -> tuple[CheckpointStore, ...]:
        return tuple(self._stores.values())

    def jobs_of_store(self, namespace: str, store: str) -> tuple[Gang, ...]:
        found = self._naming.get((CheckpointStore.KIND, namespace, store), {})
        return tuple(self._jobs[key] for key in found)

    def newest_start(self, namespace: str, store: str) -> datetime | None:
        """Return when the newest job was created that uses the store and has no round yet, or None."""
        last = self._starts.last((namespace, store))
        return None if last is None else last[0]

    def probe_pods(self, store: CheckpointStore) -> tuple[ProbePod, ...]:
        """Return the probe pods whose controller is this store by uid."""
        return self._pods.probes(store.namespace, store.uid)

    def node(self, name: str) -> NodeView | None:
        return self._nodes.get(name)

    def node_names(self) -> Iterable[str]:
        return self._nodes.keys()

    def nodes_with(self, conditions: frozenset[tuple[str, str]]) -> set[str]:
        """Return the names of the nodes that have one of these conditions."""
        if not conditions:
            return set()
        return {name for name, node in self._nodes.items() if node.conditions & conditions}

    def node_is_there(self, name: str) -> bool:
        """Return whether a Node object of this name exists, whether or not it can be parsed."""
        return name in self._nodes or name in self._hidden_nodes

    @property
    def node_contact(self) -> float | None:
        """Monotonic time at which the watch of nodes last delivered anything."""
        return self._node_watch.last_contact

    @property
    def lease_contact(self) -> float | None:
        """Monotonic time at which the watch of node leases last delivered anything."""
        return self._lease_watch.last_contact

    @property
    def lease_contact_since(self) -> float:
        """Monotonic time since which that watch has delivered something every few seconds."""
        return self._lease_watch.contact_since

    # ------------------------------------------------------------------ our own writes

    def expect_created(self, job: Gang, uid: str) -> None:
        if self._pods.worker(job.namespace, job.uid, uid) is None:
            self._expectations.expect(job.uid, created(uid), self._clock.monotonic())

    def expect_deleted(self, job: Gang, uid: str) -> None:
        pod = self._pods.worker(job.namespace, job.uid, uid)
        if pod is not None and not pod.view.terminating:
            self._expectations.expect(job.uid, deleted(uid), self._clock.monotonic())

    def take_job(self, job: Gang, reply: Mapping[str, Any]) -> None:
        """Take a job from the reply to a write of its status, which the watch delivers later."""
        seen = self._jobs.get(gang_key(job))
        if seen is None or is_at_least(seen.resource_version, reply["metadata"]["resourceVersion"]):
            return
        for reflector in self._own_watches:
            reflector.take(reply)

    # ------------------------------------------------------------------ changes

    def _job(self, old: Gang | Unreadable | None, new: Gang | Unreadable | None) -> None:
        job = new or old
        if job is None:
            return
        key = gang_key(job)
        known = self._jobs.get(key)
        if known is not None and not isinstance(old, Unreadable | None) and known.uid == old.uid:
            self._drop_job(key)
        self._note_unreadable(old, new)
        if isinstance(new, TrainingJob | CheckpointAdoption):
            self._drop_job(key)
            self._jobs[key] = new
            for named in _named(new):
                self._naming.setdefault(named, {})[key] = None
            for start in _start(new):
                self._starts.add(*start)
        if new is None:
            self._on_job_gone(job)
        self._enqueue(key)
        self._enqueue_stores_of(old, new)

    def _drop_job(self, key: Key) -> None:
        job = self._jobs.pop(key, None)
        for named in () if job is None else _named(job):
            of = self._naming[named]
            of.pop(key, None)
            if not of:
                del self._naming[named]
        for start in () if job is None else _start(job):
            self._starts.remove(*start)

    def _enqueue_stores_of(
        self, old: Gang | Unreadable | None, new: Gang | Unreadable | None
    ) -> None:
        """Queue the store of a job that appeared or was deleted: a new job makes a probe due."""
        stores = {
            (j.namespace, j.spec.store)
            for j in (old, new)
            if not isinstance(j, Unreadable | None) and j.spec.store is not None
        }
        if not isinstance(old, Unreadable | None) and not isinstance(new, Unreadable | None):
            return
        for namespace, store in stores:
            self._enqueue(store_key(namespace, store))

    def _pod(
        self, old: ManagedPod | Unreadable | None, new: ManagedPod | Unreadable | None
    ) -> None:
        if old is not None:
            self._pods.remove(old)
        if new is not None:
            self._pods.add(new)
        for pod in (old, new):
            if isinstance(pod, WorkerPod):
                gone = new is None or (isinstance(new, WorkerPod) and new.view.terminating)
                self._expectations.met(pod.job_uid, created(pod.view.uid))
                if gone:
                    self._expectations.met(pod.job_uid, deleted(pod.view.uid))
        for key in {key_of(pod) for pod in (old, new) if pod is not None}:
            if key is not None:
                self._enqueue(key)

    def _ckpt(
        self, old: Checkpoint | Unreadable | None, new: Checkpoint | Unreadable | None
    ) -> None:
        self._note_unreadable(old, new)
        if isinstance(old, Checkpoint) and self._is_known(self._checkpoints, old):
            self._drop_checkpoint(old)
        if isinstance(new, Checkpoint):
            self._checkpoints[new.namespace, new.name] = new
            self._checkpoints_of.setdefault((new.namespace, new.job), {})[new.name] = new
        subject = new or old
        if subject is None:
            return
        jobs = {item.job for item in (old, new) if item is not None and item.job is not None}
        for key in self._naming.get((Checkpoint.KIND, subject.namespace, subject.name), {}):
            self._enqueue(key)
        for name in jobs:
            for key in (job_key(subject.namespace, name), adoption_key(subject.namespace, name)):
                if key in self._jobs:
                    self._enqueue(key)
            if not self.name_is_used(subject.namespace, name):
                self._enqueue(job_key(subject.namespace, name))

    def _drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.namespace, checkpoint.name]
        of_job = self._checkpoints_of[checkpoint.namespace, checkpoint.job]
        del of_job[checkpoint.name]
        if not of_job:
            del self._checkpoints_of[checkpoint.namespace, checkpoint.job]

    def _store(
        self, old: CheckpointStore | Unreadable | None, new: CheckpointStore | Unreadable | None
    ) -> None:
        store = new or old
        if store is None:
            return
        name = (store.namespace, store.name)
        if isinstance(old, CheckpointStore) and self._is_known(self._stores, old):
            del self._stores[name]
        self._note_unreadable(old, new)
        if isinstance(new, CheckpointStore):
            self._stores[name] = new
        self._enqueue(store_key(*name))
        if _seen_by_jobs(old) == _seen_by_jobs(new):
            return  # a probe with the same result: thousands of jobs may use the store
        for job in self.jobs_of_store(*name):
            self._enqueue(gang_key(job))

    def _node(self, old: NodeView | Unreadable | None, new: NodeView | Unreadable | None) -> None:
        if isinstance(new, Unreadable):
            self._hidden_nodes.add(new.name)
            return  # the node exists, so its last parsed record is kept
        self._hidden_nodes.discard(new.name if new is not None else old.name if old else "")
        before = self._nodes.get(new.name if new is not None else old.name if old else "")
        if new is not None:
            self._nodes[new.name] = new
            changed = new.name
        elif old is not None:
            self._nodes.pop(old.name, None)
            changed = old.name
        else:
            return
        if (
            before is None
            or new is None
            or (before.taints, before.other_taints, before.conditions, before.labels)
            != (new.taints, new.other_taints, new.conditions, new.labels)
        ):
            for key in self.jobs_on_node(changed):
                self._enqueue(key)

    def _lease(self, old: Lease | Unreadable | None, new: Lease | Unreadable | None) -> None:
        if isinstance(new, Lease):
            self.leases.observe(new.node, new.renewed, self._clock.monotonic())
        elif new is None and old is not None:
            self.leases.forget(old.node if isinstance(old, Lease) else old.name)

    def _note_unreadable(self, old: object, new: object) -> None:
        """Remove an object that can be parsed now or was deleted; add one that cannot be parsed."""
        if isinstance(old, Unreadable):
            key = (old.kind, old.namespace, old.name)
            if key in self._unreadable and self._unreadable[key].uid == old.uid:
                del self._unreadable[key]
                self._unreadable_names.remove(key[:2], key[2])
        if isinstance(new, Unreadable):
            self._unreadable[new.kind, new.namespace, new.name] = new
            self._unreadable_names.add((new.kind, new.namespace), new.name)

    @staticmethod
    def _is_known(index: Mapping[tuple[str, str], _NamedT], item: _NamedT) -> bool:
        """Return whether the index holds this object, and not a newer one of the same name."""
        known = index.get((item.namespace, item.name))
        return known is not None and known.uid == item.uid


def _named(job: Gang) -> Iterable[tuple[str, str, str]]:
    """Yield kind, namespace and name of the objects that the job's spec names."""
    if job.spec.store is not None:
        yield CheckpointStore.KIND, job.namespace, job.spec.store
    if job.spec.source_checkpoint is not None:
        yield Checkpoint.KIND, job.namespace, job.spec.source_checkpoint


def _start(job: Gang) -> Iterable[tuple[tuple[str, str], tuple[datetime, str]]]:
    """Yield the key and the item of the job in the index of starts, if it has a store and no round yet."""
    if job.spec.store is not None and job.status.restart_round is None and not job.deleting:
        yield (job.namespace, job.spec.store), (job.created_at, job.uid)


def _seen_by_jobs(store: CheckpointStore | Unreadable | None) -> object:
    """Return what passes over jobs see of a store."""
    if not isinstance(store, CheckpointStore):
        return store
    return store.uid, store.deleting, store_view(store)
