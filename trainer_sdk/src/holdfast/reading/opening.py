"""`open`: the checkpoints of a folder or a store, to be read without the training script."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from holdfast.base.options import folder_path, required_store
from holdfast.base.settings import current_environment
from holdfast.directory.choice import JOB_UID, refuse_old_layout
from holdfast.reading.checkpoint import SavedCheckpoint
from holdfast.reading.source import CheckpointSource, FolderSource, ListedCheckpoint
from holdfast_core.drill import DrillReport, DrillRequest, Progress, drill, newest_of
from holdfast_core.errors import FormatError, NotFoundError
from holdfast_core.ids import CheckpointId
from holdfast_core.store_url import StoreUrl
from holdfast_core.tasks import Closing

if TYPE_CHECKING:
    from holdfast.reading.pruning import JudgedCheckpoint, PrunePlan
    from holdfast_core.retention import RetentionPolicy

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
"""A training may prune the newest checkpoint that was listed before it was opened."""


class SavedStep(NamedTuple):
    """A committed checkpoint, as a listing shows it."""

    step: int
    round: int
    """Restart round of the run that saved it. After a rollback, a higher round replaces later steps."""


class Checkpoints(Closing):
    """The committed checkpoints of a folder or a store. A training may write to it at the same time.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source

    def __repr__(self) -> str:
        return f"Checkpoints({self._source.name!r}, steps={self.steps()})"

    @property
    def name(self) -> str:
        """Path or URL."""
        return self._source.name

    def list(self) -> tuple[SavedStep, ...]:
        """Return the committed checkpoints, oldest first. A restore chooses the last one."""
        found = reversed(self._source.checkpoints())
        return tuple(SavedStep(checkpoint.step, checkpoint.round) for checkpoint in found)

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all committed checkpoints in ascending order."""
        return tuple(sorted({checkpoint.step for checkpoint in self._source.checkpoints()}))

    def at(self, step: int | None = None) -> SavedCheckpoint:
        """Open the checkpoint of a step, or the one that a restore would choose.

        If several runs have saved the step, the newest one counts. Without a step, a checkpoint with a
        damaged manifest or without some of its shards is passed over, with a warning. Raises
        NotFoundError where there is no such checkpoint, and CorruptionError where its manifest is damaged.
        """
        for _ in range(_ATTEMPTS):
            found = self._found(step)
            try:
                return self._first_that_opens(found, may_pass_over=step is None)
            except NotFoundError:
                continue
        raise NotFoundError(
            f"{self._source.name}: {_ATTEMPTS} checkpoints were pruned while they were opened: the "
            "training keeps too few of them (keep_last)"
        )

    def listing(self) -> tuple[ListedCheckpoint, ...]:
        """Return the committed checkpoints with time, ranks and bytes, oldest first, from names alone."""
        return tuple(self._source.listed())

    def pin(self, step: int) -> None:
        """Keep the newest checkpoint of a step from being deleted by any retention, `prune` or `delete`.

        The mark is durable. A pin in a folder also holds the copy in the store to which the folder uploads.
        Raises NotFoundError where there is no such step, and ConfigError in a store, which keeps no pins, and
        where the folder cannot be written.
        """
        self._source.pin(self._found(step)[0])

    def unpin(self, step: int) -> None:
        """Release the checkpoints of a step. Raises as `pin` does."""
        for checkpoint in self._found(step):
            self._source.unpin(checkpoint)

    def plan_prune(self, policy: RetentionPolicy) -> PrunePlan:
        """Return which checkpoints a policy deletes and keeps, and why. Nothing is deleted.

        The newest checkpoint that can be read is always kept, with what is newer, and in a folder what is
        pinned, what a process reads or has restored, and what waits for its upload.

        Raises ConfigError for a policy without keep_last, which keeps all, and for the best of a metric that
        no checkpoint has, and CorruptionError where the metrics of one cannot be read.
        """
        from holdfast.reading.pruning import plan_prune

        return plan_prune(self._source, policy, self.metrics_of)

    def prune(
        self, plan: PrunePlan, progress: Callable[[JudgedCheckpoint], object] | None = None
    ) -> tuple[JudgedCheckpoint, ...]:
        """Delete what a plan names, unless something needs it meanwhile: that is returned with the reason.

        plan: from `plan_prune`, of the same place.
        progress: receives each checkpoint when it is gone.

        Each checkpoint is deleted as `Checkpointer.delete` does: after an interruption at any moment it
        exists completely or not at all.

        Raises ConfigError where the folder cannot be written, and what the place raises.
        """
        from holdfast.reading.pruning import prune

        return prune(self._source, plan, progress or (lambda _: None))

    def sweep(self) -> int:
        """Delete objects of a store that no checkpoint needs. Return the number of bytes.

        Interrupted uploads and prunes leave such objects, and pruned checkpoints do as long as others need
        them. Call it only where the training is over. Objects of the last hour stay, and those of the newest
        round while an object is half written, for at most a day: an upload may go on. In a folder the next
        save does the same.
        """
        return self._source.sweep()

    def job_name(self) -> str | None:
        """Return namespace/name of the TrainingJob that saved in a store. None for a training in a folder."""
        return self._source.job_name()

    def metrics_of(self, listed: ListedCheckpoint) -> dict[str, float]:
        """Return what rank 0 had reported when it saved. Raises NotFoundError, CorruptionError."""
        with SavedCheckpoint(self._source, listed.id) as saved:
            return saved.metrics()

    def close(self) -> None:
        """Release the source. Close the opened checkpoints before."""
        self._source.close()

    def _first_that_opens(
        self, found: Sequence[CheckpointId], *, may_pass_over: bool
    ) -> SavedCheckpoint:
        """Open the first of these checkpoints. Raises NotFoundError if it was pruned meanwhile.

        If some may be passed over, it is the first that has all shards, as for a restore. Where none has, it
        is the first whose manifest can be read, because other ranks may hold what is missing.
        """
        reasons: dict[CheckpointId, str] = {}
        lacking: CheckpointId | None = None
        for checkpoint in found:
            try:
                lost = self._source.lacks(checkpoint) if may_pass_over else ()
                saved = None if lost else SavedCheckpoint(self._source, checkpoint)
            except FormatError as error:
                if not may_pass_over or (checkpoint == found[-1] and lacking is None):
                    raise
                reasons[checkpoint] = str(error)
                continue
            if saved is not None:
                self._report_passed_over(reasons)
                return saved
            if checkpoint not in self._source.checkpoints():
                raise NotFoundError(f"{self._source.name}: step {checkpoint.step} was pruned")
            reasons[checkpoint] = f"the shards of ranks {list(lost)} are missing or damaged"
            lacking = lacking or checkpoint
        assert lacking is not None, "the last one is opened, lacks shards, or raises"
        newer = itertools.takewhile(lambda one: one[0] != lacking, reasons.items())
        self._report_passed_over(dict(newer))
        return SavedCheckpoint(self._source, lacking)

    def _report_passed_over(self, reasons: Mapping[CheckpointId, str]) -> None:
        for checkpoint, why in reasons.items():
            logger.warning(
                "%s: step %d is passed over: %s", self._source.name, checkpoint.step, why
            )

    def _found(self, step: int | None) -> Sequence[CheckpointId]:
        """Return the checkpoints of a step, or all. The newest is first. Raises NotFoundError for none."""
        known = self._source.checkpoints()
        found = [c for c in known if step is None or c.step == step]
        if found:
            return found
        wanted = "any checkpoint" if step is None else f"step {step}"
        steps = ", ".join(str(one) for one in sorted({c.step for c in known}))
        raise NotFoundError(
            f"{self._source.name}: expected {wanted}, found {'steps ' + steps if steps else 'none'}"
        )


def open_checkpoints(path_or_url: str | os.PathLike[str]) -> Checkpoints:
    """Open the checkpoints of a folder or a store for reading, without the training script.

    path_or_url: the folder in which a Checkpointer saved, or the store to which it (`Folder.store`) or a
      TrainingJob uploaded: a path, file:///path, s3://bucket/prefix, az://account/container/prefix or
      gs://bucket/prefix with the endpoint and the keys as for `Folder.store`. Where a prefix holds several
      trainings, s3://bucket/prefix/namespace/uid names one.

    Nothing is changed, and a training may save there at the same time. Raises ConfigError for anything else
    than such a place, and for a prefix of several trainings, which it lists. Raises AccessDeniedError and
    UnavailableError where the store does not answer.
    """
    return Checkpoints(_source_of(path_or_url))


def verify(
    path_or_url: str | os.PathLike[str],
    step: int | None = None,
    world_size: int | None = None,
    progress: Progress = lambda read, total: None,
) -> DrillReport:
    """Read every byte of a checkpoint, and compare all digests. Nothing is changed.

    path_or_url: the folder or store, as for `open_checkpoints`.
    step: the step; without it the newest checkpoint.
    world_size: number of ranks for which the state is assembled as well, and compared.
    progress: receives the bytes of each shard after it was read, and the bytes of all. Bytes that several
      shards share are read once.

    Raises what `open_checkpoints` raises, and NotFoundError where there is no such checkpoint.
    """
    with _source_of(path_or_url) as source:
        place = source.drilled()
        checkpoint = newest_of(place, step)
        claim = source.claim(checkpoint)
        try:
            request = DrillRequest(source.job_uid, checkpoint, world_size=world_size)
            return drill(place, request, progress=progress)
        finally:
            del claim


@contextmanager
def open_each(path_or_url: str | os.PathLike[str]) -> Iterator[dict[str, Checkpoints]]:
    """Open the checkpoints of each training of a place, by its path or URL. Only a prefix may have several.

    path_or_url: the folder or store, as for `open_checkpoints`.

    Raises what `open_checkpoints` raises.
    """
    url = _store_of(path_or_url)
    if url is None:
        with open_checkpoints(path_or_url) as one:
            yield {one.name: one}
        return
    from holdfast.reading.object_store import StoreSource

    sources = StoreSource.open_each(url, current_environment())
    with sources[0]:  # they share their connections
        yield {source.name: Checkpoints(source) for source in sources}


def _source_of(path_or_url: str | os.PathLike[str]) -> CheckpointSource:
    url = _store_of(path_or_url)
    if url is None:
        return FolderSource(folder_path(path_or_url))
    from holdfast.reading.object_store import StoreSource

    return StoreSource.open(url, current_environment())


def _store_of(path_or_url: str | os.PathLike[str]) -> StoreUrl | None:
    """Return the URL of a store, or None for a folder. Raises ConfigError for anything else."""
    text = os.fspath(path_or_url)
    if isinstance(text, str) and text.strip().lower().startswith(("s3:/", "az:/", "gs:/")):
        return required_store(text)
    root = folder_path(path_or_url)
    if not (root / "tier" / JOB_UID).is_dir() and any(_manifests_of_jobs(root)):
        return required_store(f"file://{quote(str(root))}")
    refuse_old_layout(root)
    return None


def _manifests_of_jobs(root: Path) -> Iterator[Path]:
    """Yield the `manifests` directories of jobs. `root` is a store, or the part of one job in a store."""
    return itertools.chain(root.glob("manifests"), root.glob("*/*/manifests"))
