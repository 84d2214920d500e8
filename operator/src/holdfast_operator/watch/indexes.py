"""The indexes of the copies of objects: each look-up reads only what it returns.

Jobs and adoptions are found by key and by the objects that their specs name, Checkpoints by name and by job,
objects that cannot be parsed by kind and name, and pods by their owner: workers by namespace and job uid,
probes by namespace and store uid.

A pod that carries our label but is not controlled by one of our objects, or does not have the name of a
worker or probe, is foreign. No look-up returns it and it adds no key to the queue, so the operator
cannot count it as a worker, call it or delete it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from datetime import datetime
from itertools import takewhile
from typing import Any, Generic, TypeVar

from holdfast_core.api import Checkpoint, CheckpointStore, Gang, TrainingJob
from holdfast_core.ids import JobUid
from holdfast_operator.base import logs
from holdfast_operator.model.job import PodView, Unreadable
from holdfast_operator.model.keys import Key, adoption_key, job_key, store_key
from holdfast_operator.watch.records import ForeignPod, ManagedPod, ProbePod, WorkerPod

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Any)
V = TypeVar("V")
Item = ManagedPod | Unreadable


class SortedIndex(Generic[K, T]):
    """Items of each key in ascending order. Items of one key differ."""

    def __init__(self) -> None:
        self._items: dict[K, list[T]] = {}

    def add(self, key: K, item: T) -> None:
        """Add an item. An item that is there stays there once."""
        items = self._items.setdefault(key, [])
        place = bisect_left(items, item)
        if items[place : place + 1] != [item]:
            insort(items, item)

    def remove(self, key: K, item: T) -> None:
        """Remove an item if it is there."""
        items = self._items.get(key, [])
        place = bisect_left(items, item)
        if items[place : place + 1] == [item]:
            del items[place]
            if not items:
                del self._items[key]

    def last(self, key: K) -> T | None:
        """Return the largest item of the key, or None."""
        items = self._items.get(key)
        return items[-1] if items else None

    def start_at(self, key: K, item: T) -> Iterator[T]:
        """Yield the items of the key that are not smaller than `item`."""
        items = self._items.get(key, [])
        for place in range(bisect_left(items, item), len(items)):
            yield items[place]


class JobCache:
    """Index of the gangs that can be parsed."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Gang] = {}
        self._naming: dict[tuple[str, str, str], dict[Key, None]] = {}
        """Jobs by kind, namespace and name of the store and the Checkpoint that their spec names."""
        self._starts: SortedIndex[tuple[str, str], tuple[datetime, str]] = SortedIndex()
        """Creation and uid of the jobs that have no round yet, by namespace and name of their store."""

    def __len__(self) -> int:
        return len(self._jobs)

    def all(self) -> tuple[Gang, ...]:
        return tuple(self._jobs.values())

    def get(self, key: Key) -> Gang | None:
        return self._jobs.get(key)

    def of_name(self, namespace: str, name: str) -> list[Gang]:
        """Return the gangs of either kind that have this name."""
        keys = (job_key(namespace, name), adoption_key(namespace, name))
        return [self._jobs[key] for key in keys if key in self._jobs]

    def same_name(self, job: Gang) -> Gang | None:
        """Return another gang of the same name in the job's namespace, or None."""
        named = self.of_name(job.namespace, job.name)
        return next((j for j in named if j.kind != job.kind), None)

    def naming(self, kind: str, namespace: str, name: str) -> tuple[Gang, ...]:
        """Return the jobs whose spec names this store or Checkpoint."""
        return tuple(self._jobs[key] for key in self._naming.get((kind, namespace, name), {}))

    def newest_start(self, namespace: str, store: str) -> datetime | None:
        """Return when the newest job was created that uses the store and has no round yet, or None."""
        last = self._starts.last((namespace, store))
        return None if last is None else last[0]

    def put(self, key: Key, job: Gang) -> None:
        """Replace the job of this key."""
        self.drop(key)
        self._jobs[key] = job
        for named in _named(job):
            self._naming.setdefault(named, {})[key] = None
        for start in _start(job):
            self._starts.add(*start)

    def drop(self, key: Key) -> None:
        job = self._jobs.pop(key, None)
        for named in () if job is None else _named(job):
            of = self._naming[named]
            of.pop(key, None)
            if not of:
                del self._naming[named]
        for start in () if job is None else _start(job):
            self._starts.remove(*start)


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


class UnreadableCache:
    """Index of the unreadable objects of some kinds."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], Unreadable] = {}
        """Objects by kind, namespace and name."""
        self._names: SortedIndex[tuple[str, str], str] = SortedIndex()
        """Their names by kind and namespace."""

    def get(self, kind: str, namespace: str, name: str) -> Unreadable | None:
        return self._objects.get((kind, namespace, name))

    def all(self) -> tuple[Unreadable, ...]:
        return tuple(self._objects.values())

    def checkpoints(self, namespace: str, prefix: str) -> tuple[Unreadable, ...]:
        """Return the Checkpoints whose names begin with the prefix."""
        kind = Checkpoint.KIND
        names = self._names.start_at((kind, namespace), prefix)
        found = takewhile(lambda name: name.startswith(prefix), names)
        return tuple(self._objects[kind, namespace, name] for name in found)

    def note(self, old: object, new: object) -> None:
        """Remove an object that can be parsed now or was deleted; add one that cannot be parsed."""
        if isinstance(old, Unreadable):
            key = (old.kind, old.namespace, old.name)
            if key in self._objects and self._objects[key].uid == old.uid:
                del self._objects[key]
                self._names.remove(key[:2], key[2])
        if isinstance(new, Unreadable):
            self._objects[new.kind, new.namespace, new.name] = new
            self._names.add((new.kind, new.namespace), new.name)


class CheckpointCache:
    """Index of the Checkpoints that can be parsed."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], Checkpoint] = {}
        self._of_job: dict[tuple[str, str], dict[str, Checkpoint]] = {}

    def get(self, namespace: str, name: str) -> Checkpoint | None:
        return self._by_name.get((namespace, name))

    def of_job(self, namespace: str, job: str) -> tuple[Checkpoint, ...]:
        return tuple(self._of_job.get((namespace, job), {}).values())

    def job_names(self) -> Iterable[tuple[str, str]]:
        """Return namespace and name of the jobs that have Checkpoints."""
        return self._of_job.keys()

    def put(self, checkpoint: Checkpoint) -> None:
        self._by_name[checkpoint.namespace, checkpoint.name] = checkpoint
        of_job = self._of_job.setdefault((checkpoint.namespace, checkpoint.job), {})
        of_job[checkpoint.name] = checkpoint

    def drop(self, checkpoint: Checkpoint) -> None:
        """Remove the object, unless a newer one has its name."""
        known = self.get(checkpoint.namespace, checkpoint.name)
        if known is None or known.uid != checkpoint.uid:
            return
        del self._by_name[checkpoint.namespace, checkpoint.name]
        of_job = self._of_job[checkpoint.namespace, checkpoint.job]
        del of_job[checkpoint.name]
        if not of_job:
            del self._of_job[checkpoint.namespace, checkpoint.job]


class PodCache:
    """Index of the pods that carry our label."""

    def __init__(self) -> None:
        self._workers: dict[tuple[str, JobUid], dict[str, WorkerPod]] = {}
        self._uids: dict[Key, set[JobUid]] = {}
        """Uids of the jobs of each key that have pods."""
        self._on_node: dict[str, dict[str, Key]] = {}
        """Keys of the jobs of workers and placeholders by node, then by uid of the pod."""
        self._probes: dict[tuple[str, str], dict[str, ProbePod]] = {}
        self._unreadable: dict[tuple[str, str], dict[str, Unreadable]] = {}
        """Pods that cannot be parsed, by namespace and uid of the controller, then by uid."""
        self._foreign: dict[str, set[str]] = {}
        """Uids of foreign pods by namespace."""

    # ------------------------------------------------------------------ look-ups

    def workers(self, namespace: str, job_uid: JobUid) -> tuple[PodView, ...]:
        pods = self._workers.get((namespace, job_uid), {}).values()
        return tuple(p.view for p in pods if not p.view.placeholder)

    def placeholders(self, namespace: str, job_uid: JobUid) -> tuple[PodView, ...]:
        pods = self._workers.get((namespace, job_uid), {}).values()
        return tuple(p.view for p in pods if p.view.placeholder)

    def worker(self, namespace: str, job_uid: JobUid, uid: str) -> WorkerPod | None:
        return self._workers.get((namespace, job_uid), {}).get(uid)

    def of_other_jobs(self, key: Key, present: str | None) -> tuple[PodView, ...]:
        """Return the pods of the jobs of this key that have another uid than `present`."""
        others = self._uids.get(key, set()) - {present}
        return tuple(view for uid in others for view in self.workers(key.namespace, JobUid(uid)))

    def job_keys(self) -> tuple[Key, ...]:
        """Return the keys of all jobs that have pods."""
        return tuple(self._uids)

    def keys_on_node(self, node: str) -> set[Key]:
        """Return the keys of the jobs that have workers or placeholders on this node."""
        return set(self._on_node.get(node, {}).values())

    def probes(self, namespace: str, store_uid: str) -> tuple[ProbePod, ...]:
        return tuple(self._probes.get((namespace, store_uid), {}).values())

    def unreadable(self, namespace: str, owner_uid: str) -> tuple[Unreadable, ...]:
        return tuple(self._unreadable.get((namespace, owner_uid), {}).values())

    def all_unreadable(self) -> tuple[Unreadable, ...]:
        return tuple(u for found in self._unreadable.values() for u in found.values())

    def foreign_count(self) -> int:
        return sum(len(pods) for pods in self._foreign.values())

    # ------------------------------------------------------------------ changes

    def add(self, item: Item) -> None:
        match item:
            case WorkerPod():
                pods = self._workers.setdefault((item.namespace, item.job_uid), {})
                pods[item.view.uid] = item
                self._uids.setdefault(item.key, set()).add(item.job_uid)
                if item.view.node is not None:
                    self._on_node.setdefault(item.view.node, {})[item.view.uid] = item.key
            case ProbePod():
                self._probes.setdefault((item.namespace, item.store_uid), {})[item.uid] = item
            case Unreadable(owner=owner) if owner is not None:
                self._unreadable.setdefault((item.namespace, owner.uid), {})[item.uid] = item
            case ForeignPod():
                self._add_foreign(item)

    def remove(self, item: Item) -> None:
        match item:
            case WorkerPod():
                index = (item.namespace, item.job_uid)
                _discard(self._workers, index, item.view.uid)
                if item.view.node is not None:
                    _discard(self._on_node, item.view.node, item.view.uid)
                if index not in self._workers:
                    self._forget(item)
            case ProbePod():
                _discard(self._probes, (item.namespace, item.store_uid), item.uid)
            case Unreadable(owner=owner) if owner is not None:
                _discard(self._unreadable, (item.namespace, owner.uid), item.uid)
            case ForeignPod():
                pods = self._foreign.get(item.namespace, set())
                pods.discard(item.uid)
                if not pods:
                    self._foreign.pop(item.namespace, None)

    def _forget(self, last: WorkerPod) -> None:
        uids = self._uids.get(last.key, set())
        uids.discard(last.job_uid)
        if not uids:
            self._uids.pop(last.key, None)

    def _add_foreign(self, pod: ForeignPod) -> None:
        pods = self._foreign.setdefault(pod.namespace, set())
        if not pods:  # one line per namespace, so that thousands of such pods cannot fill the log
            logs.warning(
                f"pod {pod.namespace}/{pod.name} has the label of Holdfast's pods, but not the "
                f"controller and the name of such a pod ({pod.whose}). The operator ignores it and "
                "all such pods of this namespace; metric holdfast_foreign_pods counts them"
            )
        pods.add(pod.uid)


def key_of(item: Item) -> Key | None:
    """Return the key of the job or store that needs a pass when this pod changes."""
    match item:
        case WorkerPod():
            return item.key
        case ProbePod():
            return store_key(item.namespace, item.store)
        case Unreadable(owner=owner) if owner is not None and owner.kind == TrainingJob.KIND:
            return job_key(item.namespace, owner.name)
        case Unreadable(owner=owner) if owner is not None and owner.kind == CheckpointStore.KIND:
            return store_key(item.namespace, owner.name)
    return None


def _discard(index: dict[K, dict[str, V]], key: K, uid: str) -> None:
    found = index.get(key)
    if found is not None:
        found.pop(uid, None)
        if not found:
            del index[key]
