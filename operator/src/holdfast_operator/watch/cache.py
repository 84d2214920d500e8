"""The copies of all objects that the operator watches, their reflectors, and the indexes of look-ups.

Each look-up reads only what it returns. Jobs and adoptions are found by key and by the objects that their
specs name, Checkpoints by name and by job, objects that cannot be parsed by kind and name, and pods by their
owner: workers by namespace and job uid, pods that run a command by store and verb.

A pod that carries our label but is not controlled by one of our objects, or does not have the name of a
worker or of a store's command, is foreign. No look-up returns it and it adds no key to the queue, so the
operator cannot count it as a worker, call it or delete it.

The cache only reads from the API and is as new as the newest event. Each change adds the keys of the
affected jobs and stores to the work queue.

The cache also knows which pods the operator created or deleted that the reflectors have not delivered yet. A
pass on older reads would repeat these writes. Repeating is harmless, because names are deterministic, but
waiting saves the calls. An expectation that is never met expires, and the next pass acts on what the
reflectors show.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Mapping, ValuesView
from datetime import datetime
from typing import Any, Generic, TypeVar

from holdfast_core import logs
from holdfast_core.api import (
    GANGS,
    GROUP,
    VERSION,
    Checkpoint,
    CheckpointAdoption,
    CheckpointGrant,
    CheckpointPhase,
    CheckpointStore,
    Gang,
    TrainingJob,
    WhenDeleted,
    is_granted,
)
from holdfast_core.clock import Clock
from holdfast_core.contract import StoreVerb
from holdfast_core.ids import JobUid
from holdfast_core.sources import NoSource, find_source
from holdfast_core.store_retention import cloned_of
from holdfast_operator.kube.api import KubeApi
from holdfast_operator.model import labels
from holdfast_operator.model.command_pods import CommandView
from holdfast_operator.model.job import NodeView, PodView, Unreadable, store_view
from holdfast_operator.model.ownership import (
    Key,
    KeyKind,
    adoption_key,
    gang_key,
    job_key,
    store_key,
)
from holdfast_operator.watch.nodes import NodeCache, NodeLeases
from holdfast_operator.watch.records import (
    CommandPod,
    ForeignPod,
    Lease,
    ManagedPod,
    WorkerPod,
    node_view,
    read_adopted_pod,
    read_lease,
    read_pod,
)
from holdfast_operator.watch.reflector import Collection, Reflector, Timings, is_at_least

T = TypeVar("T")
Item = ManagedPod | Unreadable
Names = tuple[Hashable, ...]


class Index(Generic[T]):
    """Objects by their own key, and by the groups that they belong to.

    Args:
        key: Returns the key of an object.
        groups: Returns the groups of an object.
    """

    def __init__(
        self, key: Callable[[T], Names], groups: Callable[[T], Iterable[Names]] = lambda _: ()
    ) -> None:
        self._key = key
        self._groups_of = groups
        self._items: dict[Names, T] = {}
        self._groups: dict[Names, dict[Names, T]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def all(self) -> tuple[T, ...]:
        return tuple(self._items.values())

    def get(self, *key: Hashable) -> T | None:
        return self._items.get(key)

    def of(self, *group: Hashable) -> tuple[T, ...]:
        return tuple(self.members(*group))

    def members(self, *group: Hashable) -> ValuesView[T]:
        """Return the members of a group as a view, which is valid until the next change."""
        return self._groups.get(group, {}).values()

    def groups(self) -> tuple[Names, ...]:
        """Return all groups that have members."""
        return tuple(self._groups)

    def put(self, item: T) -> None:
        """Add the object, in the place of another one with its key."""
        key = self._key(item)
        if key in self._items:
            self.drop(self._items[key])
        self._items[key] = item
        for group in self._groups_of(item):
            self._groups.setdefault(group, {})[key] = item

    def drop(self, item: T) -> None:
        """Remove the object, unless a newer one has its key."""
        key = self._key(item)
        if self._items.get(key) is not item:
            return
        del self._items[key]
        for group in self._groups_of(item):
            members = self._groups[group]
            del members[key]
            if not members:
                del self._groups[group]


class JobIndex(Index[Gang]):
    """The gangs that can be parsed, by key, and by the objects that their specs name."""

    def __init__(self) -> None:
        super().__init__(lambda job: (gang_key(job),), _named)
        self._starts: dict[tuple[str, str], list[tuple[datetime, str]]] = {}
        """Creation and uid of the jobs that have no round yet, sorted, by namespace and name of the store."""

    def of_name(self, namespace: str, name: str) -> list[Gang]:
        """Return the gangs of either kind that have this name."""
        found = map(self.get, (job_key(namespace, name), adoption_key(namespace, name)))
        return [job for job in found if job is not None]

    def same_name(self, job: Gang) -> Gang | None:
        """Return another gang of the same name in the job's namespace, or None."""
        named = self.of_name(job.namespace, job.name)
        return next((j for j in named if j.kind != job.kind), None)

    def with_source(self, namespace: str) -> tuple[Gang, ...]:
        """Return the gangs of any namespace that start from a Checkpoint of this one."""
        return self.of("source", namespace)

    def newest_start(self, namespace: str, store: str) -> datetime | None:
        """Return when the newest job was created that uses the store and has no round yet, or None."""
        starts = self._starts.get((namespace, store))
        return starts[-1][0] if starts else None

    def put(self, item: Gang) -> None:
        super().put(item)
        if _starts(item):
            starts = self._starts.setdefault((item.namespace, item.spec.store or ""), [])
            insort(starts, (item.created_at, item.uid))

    def drop(self, item: Gang) -> None:
        if _starts(item) and self.get(gang_key(item)) is item:
            self._starts[item.namespace, item.spec.store or ""].remove((item.created_at, item.uid))
        super().drop(item)


def _named(job: Gang) -> Iterable[Names]:
    """Yield kind, namespace and name of the objects that the spec names, and whether it has a source."""
    if job.spec.store is not None:
        yield CheckpointStore.KIND, job.namespace, job.spec.store
    if job.spec.restore_from is not None:
        namespace = job.spec.source_namespace(job.namespace)
        yield "source", namespace
        if job.spec.source_checkpoint is not None:
            yield Checkpoint.KIND, namespace, job.spec.source_checkpoint


def _checkpoint_groups(checkpoint: Checkpoint) -> Iterable[Names]:
    yield checkpoint.namespace, checkpoint.job
    yield from _store_groups(checkpoint)


def _store_groups(checkpoint: Checkpoint) -> Iterable[tuple[str, str, str]]:
    status = checkpoint.status
    if status.store is None:
        return
    namespace, store = checkpoint.namespace, status.store
    yield "store", namespace, store
    if checkpoint.drill_requested:
        yield "drill", namespace, store
    going = (checkpoint.deleting and checkpoint.has_finalizer) or (
        status.phase is CheckpointPhase.DELETING
    )
    outlives = status.when_deleted not in (None, WhenDeleted.RETAIN)
    if going or outlives or checkpoint.lacks_finalizer:
        yield "delete", namespace, store


def _starts(job: Gang) -> bool:
    """Return whether the job has a store and no round yet."""
    return job.spec.store is not None and job.status.restart_round is None and not job.deleting


def unreadable_index() -> Index[Unreadable]:
    """Return an index by kind, namespace and name.

    `names.job_prefix` groups the Checkpoints of a job, and the namespace of their source groups gangs.
    """
    return Index(
        lambda u: (u.kind, u.namespace, u.name),
        lambda u: [
            (u.kind, u.namespace, u.name.rsplit("-", 2)[0]),
            *([] if u.source is None else [("source", u.source.namespace)]),
        ],
    )


class PodIndex(Index[Item]):
    """The pods that carry our label, by uid, and by what they belong to."""

    def __init__(self) -> None:
        super().__init__(lambda item: (item.uid,), _pod_groups)

    # ------------------------------------------------------------------ look-ups

    def workers(self, namespace: str, job_uid: JobUid) -> tuple[PodView, ...]:
        pods = self.members("job", namespace, job_uid)
        return tuple(p.view for p in pods if isinstance(p, WorkerPod) and not p.view.placeholder)

    def placeholders(self, namespace: str, job_uid: JobUid) -> tuple[PodView, ...]:
        pods = self.members("job", namespace, job_uid)
        return tuple(p.view for p in pods if isinstance(p, WorkerPod) and p.view.placeholder)

    def of_other_jobs(self, key: Key, present: str | None) -> tuple[PodView, ...]:
        """Return the workers of the jobs of this key that have another uid than `present`."""
        return tuple(
            p.view
            for p in self.members("key", key)
            if isinstance(p, WorkerPod) and p.job_uid != present and not p.view.placeholder
        )

    def job_keys(self) -> tuple[Key, ...]:
        """Return the keys of all jobs that have pods."""
        return tuple(key for _, *names in self.groups() for key in names if isinstance(key, Key))

    def keys_on_node(self, node: str) -> set[Key]:
        """Return the keys of the jobs that have workers or placeholders on this node."""
        return {p.key for p in self.members("node", node) if isinstance(p, WorkerPod)}

    def commands(self, store: CheckpointStore, verb: StoreVerb) -> tuple[CommandView, ...]:
        """Return the pods of a store that run a command of this verb."""
        pods = self.members("command", store.namespace, store.uid, verb)
        return tuple(p.view for p in pods if isinstance(p, CommandPod))

    def unreadable(self, *owner: str) -> tuple[Unreadable, ...]:
        """Return the pods that cannot be parsed, all or those of a namespace and uid of the controller."""
        return tuple(p for p in self.members("unreadable", *owner) if isinstance(p, Unreadable))

    def foreign_count(self) -> int:
        return len(self.members("foreign"))

    # ------------------------------------------------------------------ changes

    def put(self, item: Item) -> None:
        if isinstance(item, ForeignPod) and not self.members("foreign", item.namespace):
            # One line per namespace, so that thousands of such pods cannot fill the log.
            logs.warning(
                f"pod {item.namespace}/{item.name} has the label of Holdfast's pods, but not the "
                f"controller and the name of such a pod ({item.whose}). The operator ignores it and "
                "all such pods of this namespace; metric holdfast_foreign_pods counts them"
            )
        super().put(item)


def _pod_groups(item: Item) -> Iterable[Names]:
    match item:
        case WorkerPod():
            yield "job", item.namespace, item.job_uid
            yield "key", item.key
            if item.view.node is not None:
                yield "node", item.view.node
        case CommandPod():
            yield "command", item.namespace, item.store.uid, item.verb
        case ForeignPod():
            yield ("foreign",)
            yield "foreign", item.namespace
        case Unreadable(owner=owner) if owner is not None:
            yield ("unreadable",)
            yield "unreadable", item.namespace, owner.uid


def key_of(item: Item) -> Key | None:
    """Return the key of the object that needs a pass when this pod changes."""
    match item:
        case WorkerPod() | CommandPod():
            return item.key
        case Unreadable(owner=owner) if owner is not None and owner.kind == TrainingJob.KIND:
            return job_key(item.namespace, owner.name)
        case Unreadable(owner=owner) if owner is not None and owner.kind == CheckpointStore.KIND:
            return store_key(item.namespace, owner.name)
    return None


# --------------------------------------------------------------------------- the copies


EXPIRE_SECONDS = 5.0
"""Time after which a pass no longer waits for the watch to deliver a write of the operator."""


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
            lambda c: (c.namespace, c.name), _checkpoint_groups
        )
        """Checkpoints by namespace and name, and by namespace and name of their job. By namespace and name of
        their store: all ("store"), those for which a drill is requested ("drill"), and those that a pod may
        have to delete from it, now or later ("delete", decide/deletions.py)."""
        self.stores: Index[CheckpointStore] = Index(
            lambda s: (s.namespace, s.name), lambda s: [(s.namespace,)]
        )
        """CheckpointStores by namespace and name, and by namespace."""
        self.grants: Index[CheckpointGrant] = Index(
            lambda g: (g.namespace, g.name), lambda g: [(g.namespace,)]
        )
        """CheckpointGrants by namespace and name, and by namespace."""
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
            jobs, adoptions, checkpoints, stores, grants = (
                Collection(name, f"{ours}{scope}/{kind.PLURAL}", kind=kind.KIND)
                for name, kind in (
                    ("jobs", TrainingJob),
                    ("adoptions", CheckpointAdoption),
                    ("checkpoints", Checkpoint),
                    ("stores", CheckpointStore),
                    ("grants", CheckpointGrant),
                )
            )
            self._own_watches += (
                watch(jobs, TrainingJob.from_dict, self._job),
                watch(adoptions, CheckpointAdoption.from_dict, self._job),
                watch(checkpoints, Checkpoint.from_dict, self._ckpt),
                watch(stores, CheckpointStore.from_dict, self._store),
                watch(grants, CheckpointGrant.from_dict, self._grant),
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
            elif hidden.kind not in (Checkpoint.KIND, CheckpointGrant.KIND):
                self._enqueue(gang_key(hidden))
        for store in self.stores.all():
            self._enqueue(store_key(store.namespace, store.name))
        for group in self.checkpoints.groups():
            *kind, namespace, name = map(str, group)
            if kind:
                self._enqueue(store_key(namespace, name))
            elif not self.jobs.of_name(namespace, name):
                self._enqueue(job_key(namespace, name))
        for key in self.pods.job_keys():
            if self.jobs.get(key) is None:
                self._enqueue(key)

    # ------------------------------------------------------------------ look-ups

    def clones(self, namespace: str) -> tuple[Gang, ...]:
        """Return the gangs that start from a Checkpoint of this namespace, of their own or by a grant.

        Others would keep data of the namespace without its owner's will.
        """
        found = self.jobs.with_source(namespace)
        return tuple(g for g in found if g.namespace == namespace or self.is_granted(g, namespace))

    def source_job(self, job: Gang) -> Gang | None:
        """Return the present gang of the name in spec.restoreFrom.jobRef, or None."""
        name = job.spec.source_job
        named = [] if name is None else self.jobs.of_name(job.namespace, name)
        return next((j for j in named if j.uid != job.uid), None)

    def cloned(self, namespace: str, job: str, uid: JobUid) -> frozenset[str]:
        """Return the names of this job's Checkpoints, and of others, from which other jobs start."""
        starting = (j for j in self.clones(namespace) if j.spec.source_job in (None, job))
        found = cloned_of(starting, uid, self._source_of)
        hidden = (u for u in self.unreadable.of("source", namespace) if u.uid != uid)
        return found.union(*(self._named_by(u, namespace, job) for u in hidden))

    def _named_by(self, hidden: Unreadable, namespace: str, job: str) -> set[str]:
        """Return the names of this job's Checkpoints from which a gang may start that cannot be parsed."""
        source = hidden.source
        if source is None or source.job not in ("", job):
            return set()
        known = {c.name for c in self.checkpoints.of(namespace, job)}
        if hidden.namespace == namespace:
            return {source.checkpoint} if source.checkpoint else known
        grants, asks = self.grants.of(namespace), (hidden.namespace, hidden.name)
        return {source.checkpoint} if is_granted(grants, *asks, source.checkpoint) else set()

    def _source_of(self, job: Gang) -> Checkpoint | NoSource:
        found = self.checkpoints.of(job.namespace, job.spec.source_job)
        return find_source(job, found, self.source_job(job))

    def is_granted(self, job: Gang, namespace: str) -> bool:
        """Return whether a grant of that namespace lets the job start from the Checkpoint that it names."""
        source, grants = job.spec.source_checkpoint, self.grants.of(namespace)
        return source is not None and is_granted(grants, job.namespace, job.name, source)

    def unreadable_job(self, key: Key) -> Unreadable | None:
        """Return the job of this key if it exists and cannot be parsed."""
        kind = CheckpointAdoption.KIND if key.kind is KeyKind.ADOPTION else TrainingJob.KIND
        return self.unreadable.get(kind, key.namespace, key.name)

    def has_job(self, key: Key, uid: JobUid) -> bool:
        """Return whether the job of this key and uid exists, whether or not it can be parsed."""
        found = self.jobs.get(key) or self.unreadable_job(key)
        return found is not None and found.uid == uid

    def job_uids(self) -> set[JobUid]:
        """Return the uids of all jobs that exist, including those that cannot be parsed."""
        kinds = [kind.KIND for kind in GANGS]
        hidden = {JobUid(u.uid) for u in self.unreadable.all() if u.kind in kinds}
        return hidden | {j.uid for j in self.jobs.all()}

    def unreadable_objects(self) -> tuple[Unreadable, ...]:
        """Return all objects of our own kinds, and pods of jobs and stores, that cannot be parsed."""
        return (*self.unreadable.all(), *self.pods.unreadable())

    def has_deletions(self, namespace: str, store: str) -> bool:
        """Return whether a pod may have to delete something in a store, or one is there."""
        if self.checkpoints.members("delete", namespace, store):
            return True
        found = self.stores.get(namespace, store)
        return found is not None and bool(self.pods.commands(found, StoreVerb.DELETE))

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
        if isinstance(new, Checkpoint):
            for kind, namespace, name in _store_groups(new):
                if kind != "store":
                    self._enqueue(store_key(namespace, name))
        names = {item.job for item in (old, new) if item is not None and item.job is not None}
        for job in self.jobs.of(Checkpoint.KIND, subject.namespace, subject.name):
            self._enqueue(gang_key(job))
        for name in names:
            self._enqueue_name(subject.namespace, name)

    def _enqueue_name(self, namespace: str, name: str) -> None:
        """Queue the gangs of this name, or the missing job whose Checkpoints are left."""
        found = map(gang_key, self.jobs.of_name(namespace, name))
        for key in tuple(found) or (job_key(namespace, name),):
            self._enqueue(key)

    def _grant(
        self, old: CheckpointGrant | Unreadable | None, new: CheckpointGrant | Unreadable | None
    ) -> None:
        """Take a grant over. One that cannot be parsed permits nothing."""
        self._take(self.grants, old, new)
        subject = new or old
        namespace = "" if subject is None else subject.namespace
        for job in self.jobs.with_source(namespace):
            if job.namespace != namespace:
                self._enqueue(gang_key(job))

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
        for left in {c.job for c in self.checkpoints.members("store", *name)}:
            self._enqueue_name(store.namespace, left)

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
