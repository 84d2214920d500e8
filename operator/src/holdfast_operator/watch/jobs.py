"""Jobs and adoptions by key, with the objects that their specs name."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from holdfast_core.api import Checkpoint, CheckpointStore, Gang
from holdfast_operator.model.keys import Key, adoption_key, job_key
from holdfast_operator.watch.sorted_index import SortedIndex


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
