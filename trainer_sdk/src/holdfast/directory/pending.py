"""The saves that are durable on this rank and wait for their commit, and what their ranks are told.

An exception of a commit fails that save and is reported to its rank. It does not end the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from holdfast.directory.open_folder import OpenFolder
from holdfast_core.errors import HoldfastError
from holdfast_core.failpoint import failpoint
from holdfast_core.ids import CheckpointId, Level, Rank, age_of
from holdfast_core.messages.schema import NO_OBJECT_TIER, LevelReached, SaveFailed

if TYPE_CHECKING:  # it needs what the extra `holdfast-sdk[s3]` installs
    from holdfast.directory.uploads import Uploads

logger = logging.getLogger(__name__)

Push = Callable[[Any], None]
_MAX_REASON_CHARACTERS = 2000


class PendingCommits:
    """The commits that this process waits for. Thread-safe; `commit_complete` runs in one thread at a time.

    `on_folder_lost` is called when the folder was deleted or unmounted.
    """

    def __init__(
        self, folder: OpenFolder, uploads: Uploads | None, on_folder_lost: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._uploads = uploads
        self._on_folder_lost = on_folder_lost
        self._lock = threading.Condition()
        self._pending: dict[CheckpointId, list[Push]] = {}
        self.failures = 0
        """Number of saves that have failed."""

    def add(self, checkpoint: CheckpointId, pushes: Iterable[Push]) -> None:
        """Wait for the commit of a checkpoint, and tell its ranks by `pushes`."""
        with self._lock:
            self._pending.setdefault(checkpoint, []).extend(pushes)

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def wait(self, seconds: float) -> bool:
        """Wait until every commit has ended. Return False if the time ran out."""
        with self._lock:
            return self._lock.wait_for(lambda: self.is_empty, seconds)

    def has_record(self, checkpoint: CheckpointId, rank: Rank) -> bool:
        """Return whether the rank's shard is durable with its record, or the checkpoint is committed."""
        committer = self._folder.committer
        return committer.is_prepared(checkpoint, rank) or committer.is_committed(checkpoint)

    def commit_complete(self) -> None:
        """Commit complete checkpoints (on rank 0), report committed ones, prune, and fail older saves."""
        folder = self._folder
        for checkpoint in sorted(tuple(self._pending), key=age_of):
            try:
                if not self._commit(checkpoint):
                    continue
            except BaseException as error:  # noqa: BLE001 - it is logged, and the rank receives it
                warn(error, "commit of %s failed: %s", checkpoint)
                self._give_up(checkpoint, "CommitFailed", describe(error))
                self.end_if_lost(error)
                continue
            self._report_committed(checkpoint)
            try:
                folder.expect_present()
                leader = folder.options.leads
                folder.committer.prune(checkpoint, self._protected, leader=leader)
            except BaseException as error:  # noqa: BLE001 - it is logged
                warn(
                    error,
                    "pruning after %s failed, it is tried again after the next save: %s",
                    checkpoint,
                )

    def deleted_for(self, wanted: CheckpointId) -> Callable[[CheckpointId], None]:
        """Return what to call with a checkpoint that was deleted to make room for `wanted`."""
        text = f"it was deleted to make room for step {wanted.step}"
        return lambda gone: self._give_up(gone, "NoRoom", text)

    def failed(self, pushes: Iterable[Push], failure: SaveFailed) -> None:
        """Count a save that has failed, and tell its ranks."""
        self.failures += 1
        _push_all(pushes, [failure])

    def fail(
        self, checkpoint: CheckpointId, pushes: Iterable[Push], reason: str, text: str
    ) -> None:
        self.failed(pushes, _failed(checkpoint, Level.LOCAL, reason, text))

    def give_up_all(self, reason: str, text: str) -> None:
        for checkpoint in tuple(self._pending):
            self._give_up(checkpoint, reason, text)

    def abandon(self) -> None:
        """Forget what waits, as the end of the process does."""
        with self._lock:
            self._pending.clear()

    def end_if_lost(self, error: BaseException) -> None:
        """Call `on_folder_lost` if a write failed because the folder was deleted or unmounted."""
        if self._folder.is_lost_by(error):
            self._on_folder_lost()

    # ------------------------------------------------------------------ inside

    def _commit(self, checkpoint: CheckpointId) -> bool:
        """Commit the checkpoint if this process leads and it is complete. Return whether it is committed."""
        failpoint("directory.slot_freed")
        failpoint("directory.before_commit")
        folder, committer = self._folder, self._folder.committer
        folder.expect_present()
        if folder.options.leads and committer.is_complete(checkpoint):
            folder.write(
                checkpoint, lambda: committer.commit(checkpoint), self.deleted_for(checkpoint)
            )
        return committer.is_committed(checkpoint)

    def _report_committed(self, checkpoint: CheckpointId) -> None:
        """Report the checkpoint's levels, and fail older saves that not all ranks have finished."""
        pushes = self._take(checkpoint)
        if pushes is not None:
            _push_all(pushes, _levels(checkpoint, has_store=self._uploads is not None))
        if self._uploads is not None:
            self._uploads.committed(checkpoint)
        text = f"step {checkpoint.step} was committed before all ranks had saved this one"
        for other in list(self._pending):
            if age_of(other) < age_of(checkpoint):
                self._give_up(other, "Superseded", text)

    @property
    def _protected(self) -> frozenset[CheckpointId]:
        """The checkpoints that pruning keeps: the restore point, and what waits for its upload."""
        protected = self._folder.protected
        waiting = frozenset[CheckpointId]() if self._uploads is None else self._uploads.wanted
        return waiting if protected is None else waiting | {protected}

    def _give_up(self, checkpoint: CheckpointId, reason: str, text: str) -> None:
        pushes = self._take(checkpoint)
        if pushes is not None:
            self.fail(checkpoint, pushes, reason, text)

    def _take(self, checkpoint: CheckpointId) -> list[Push] | None:
        with self._lock:
            pushes = self._pending.pop(checkpoint, None)
            self._lock.notify_all()
        return pushes


def describe(error: BaseException) -> str:
    """Return the text of an error for a message to the trainer.

    The text starts with the type, except for errors of Holdfast, which explain themselves.
    """
    text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_REASON_CHARACTERS]


def warn(error: BaseException, text: str, what: object) -> None:
    """Log a failure, with the traceback of an error that is not expected."""
    unexpected = not isinstance(error, HoldfastError | OSError)
    logger.warning(text, what, describe(error), exc_info=unexpected)


def _push_all(pushes: Iterable[Push], messages: list[Any]) -> None:
    """Push messages to all waiting ranks. A failed push is only logged: the trainer stages again."""
    for push in pushes:
        try:
            for message in messages:
                push(message)
        except BaseException:
            logger.exception("the outcome of a save was not sent to its rank: %s", messages)


def _levels(checkpoint: CheckpointId, *, has_store: bool) -> list[Any]:
    """Return the messages for a committed checkpoint.

    A directory holds one copy. A local checkpoint therefore counts as replicated. Without a store it is
    never persisted, and a wait for that level must end.
    """
    step, round_ = checkpoint.step, checkpoint.round
    reached = [
        LevelReached(step, round_, Level.LOCAL),
        LevelReached(step, round_, Level.REPLICATED),
    ]
    if has_store:
        return reached
    text = "the folder has no object store; set Folder(store=...)"
    return [*reached, _failed(checkpoint, Level.PERSISTED, NO_OBJECT_TIER, text)]


def _failed(checkpoint: CheckpointId, level: Level, reason: str, text: str) -> SaveFailed:
    return SaveFailed(checkpoint.step, checkpoint.round, level, reason, text)
