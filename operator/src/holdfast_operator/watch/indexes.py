"""The indexes of the copies of objects: each look-up reads only what it returns.

Jobs and adoptions are found by key and by the objects that their specs name, Checkpoints by name and by job,
objects that cannot be parsed by kind and name, and pods by their owner: workers by namespace and job uid,
probes by namespace and store uid.

A pod that carries our label but is not controlled by one of our objects, or does not have the name of a
worker or probe, is foreign. No look-up returns it and it adds no key to the queue, so the operator
cannot count it as a worker, call it or delete it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Hashable, Iterable
from datetime import datetime
from typing import Generic, TypeVar

from holdfast_core.api import Checkpoint, CheckpointStore, Gang, TrainingJob
from holdfast_core.ids import JobUid
from holdfast_operator.base import logs
from holdfast_operator.model.job import PodView, Unreadable
from holdfast_operator.model.ownership import Key, adoption_key, gang_key, job_key, store_key
from holdfast_operator.watch.records import ForeignPod, ManagedPod, ProbePod, WorkerPod

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

    def members(self, *group: Hashable) -> Collection[T]:
        """Return the members of a group as a view, which is valid until the next change."""
        found = self._groups.get(group)
        return () if found is None else found.values()

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
    """Yield kind, namespace and name of the objects that the job's spec names."""
    if job.spec.store is not None:
        yield CheckpointStore.KIND, job.namespace, job.spec.store
    if job.spec.source_checkpoint is not None:
        yield Checkpoint.KIND, job.namespace, job.spec.source_checkpoint


def _starts(job: Gang) -> bool:
    """Return whether the job has a store and no round yet."""
    return job.spec.store is not None and job.status.restart_round is None and not job.deleting


def unreadable_index() -> Index[Unreadable]:
    """Return an index by kind, namespace and name. `names.job_prefix` groups the Checkpoints of a job."""
    return Index(
        lambda u: (u.kind, u.namespace, u.name),
        lambda u: [(u.kind, u.namespace, u.name.rsplit("-", 2)[0])],
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

    def probes(self, namespace: str, store_uid: str) -> tuple[ProbePod, ...]:
        pods = self.members("store", namespace, store_uid)
        return tuple(p for p in pods if isinstance(p, ProbePod))

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
        case ProbePod():
            yield "store", item.namespace, item.store_uid
        case ForeignPod():
            yield ("foreign",)
            yield "foreign", item.namespace
        case Unreadable(owner=owner) if owner is not None:
            yield ("unreadable",)
            yield "unreadable", item.namespace, owner.uid


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
