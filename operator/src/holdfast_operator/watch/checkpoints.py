"""Checkpoints by name and by job."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.api import Checkpoint


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
