"""Pods by their owner: workers by namespace and job uid, probes by namespace and store uid.

A pod that carries our label but is not controlled by one of our objects, or does not have the name of a
worker or probe, is foreign. No look-up returns it and it adds no key to the queue, so the operator
cannot count it as a worker, call it or delete it.
"""

from __future__ import annotations

from typing import TypeVar

from holdfast_core.api import CheckpointStore, TrainingJob
from holdfast_core.ids import JobUid
from holdfast_operator.base import logs
from holdfast_operator.model.job import PodView, Unreadable
from holdfast_operator.model.keys import Key, job_key, store_key
from holdfast_operator.watch.records import ForeignPod, ManagedPod, ProbePod, WorkerPod

Item = ManagedPod | Unreadable
K = TypeVar("K")
V = TypeVar("V")


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
