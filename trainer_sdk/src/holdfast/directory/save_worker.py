"""The thread that makes staged saves durable in a folder, and commits and prunes its checkpoints.

1. `stage` checks a slot and queues it. The slot is OWNED until it is written.
2. The thread digests and writes the slots in order, writes a record of each shard, and frees the slot.
3. It commits a checkpoint when all ranks have written their records (rank 0), reports the commit to the
   ranks, and prunes older checkpoints.

An exception during a save fails that save and is reported to its rank. It does not end the thread.

A rank may save a step again. Levels name only the step, so that the rank has to know before that its bytes
are those of the earlier save: the reply to such a Stage waits until the thread has compared them.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.directory.choice import JOB_UID
from holdfast.directory.open_folder import OpenFolder
from holdfast_core.errors import (
    AlreadyExistsError,
    FormatError,
    HoldfastError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.failpoint import failpoint
from holdfast_core.format.rank_layout import LayoutDigests, layout_digests
from holdfast_core.ids import CheckpointId, Digest, Level, Rank, Step, age_of
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    LevelReached,
    Refusal,
    SaveFailed,
    Stage,
    Staged,
)
from holdfast_core.pacing.background_limit import BackgroundLimit, bytes_each_step
from holdfast_core.shm.layout_files import LayoutFiles
from holdfast_core.shm.slot_file import SlotFile, SlotState
from holdfast_core.shm.slot_save import check_slot, saved_before, shard_header

if TYPE_CHECKING:  # it needs what the extra `holdfast-sdk[s3]` installs
    from holdfast.directory.uploads import Uploads

logger = logging.getLogger(__name__)

Push = Callable[[Any], None]

_POLL_SECONDS = 0.01
_MAX_REASON_CHARACTERS = 2000


@dataclass(slots=True)
class _Pending:
    """A save that is durable on this rank and waits for its commit."""

    checkpoint: CheckpointId
    pushes: list[Push] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Job:
    """A staged save. Its slot stays open, because a rank of the next run may replace the file of its name."""

    stage: Stage
    slot: SlotFile
    push: Push
    written: Future[None] | None = None
    """For a step that the rank has saved before: the end of this save, for which the reply waits."""

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.stage.step, self.stage.round)

    def is_of(self, stage: Stage) -> bool:
        """Return whether this is a save of the same rank and step."""
        return (self.stage.rank, self.stage.step) == (stage.rank, stage.step)


class SaveWorker:
    """Queue of the staged saves of one folder, with the thread that serves it. Thread-safe.

    `on_end` is called in the thread with the exception that has ended it, and `on_folder_lost` when the
    folder was deleted or unmounted.
    """

    def __init__(
        self,
        folder: OpenFolder,
        layouts: LayoutFiles,
        background: BackgroundLimit,
        on_end: Callable[[BaseException], None],
        on_folder_lost: Callable[[], None],
        uploads: Uploads | None = None,
    ) -> None:
        self._folder = folder
        self._uploads = uploads
        self._layouts = layouts
        self._background = background
        self._last_steps: dict[Rank, Step] = {}
        self._digests: dict[Digest, LayoutDigests] = {}
        """Digests of the layouts that this process has put into the folder."""
        self._on_end = on_end
        self._on_folder_lost = on_folder_lost
        self._error: BaseException | None = None
        self._failures = 0
        self._lock = threading.Condition()
        self._queue: collections.deque[_Job] = collections.deque()
        self._pending: dict[CheckpointId, _Pending] = {}
        self._current: _Job | None = None
        """The save that is being written."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="holdfast-write", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stage(self, message: Stage, push: Push) -> Staged:
        """Take ownership of a full slot and queue its save. Return when the rank may rely on the levels.

        Args:
            message: What the rank sent.
            push: Sends later messages about the save to the rank.

        Raises:
            RefusedError: Nothing can be written, or the step was saved before with other bytes.
            FormatError: The slot contradicts the message.
            HoldfastError: The layout cannot be stored, or a repeated save cannot be written.
        """
        self._expect_writable()
        with self._lock:
            if any(job.stage == message for job in self._queue):
                return Staged(message.step)
        try:
            slot = self._folder.open_slot(message.slot)
        except UnavailableError:
            if self._was_made_durable(message, push):
                return Staged(message.step)
            raise
        job = _Job(message, slot, push)
        try:
            try:
                check_slot(slot.header(), message, SlotState.FULL, SlotState.OWNED)
            except FormatError:
                if not self._was_made_durable(message, push):
                    raise
                slot.close()
                return Staged(message.step)
            self._put_layout(job)
            slot.set_state(SlotState.OWNED)
        except BaseException:
            slot.close()
            raise
        with self._lock:
            if self._is_repeated(message):
                job = replace(job, written=Future())
            self._queue.append(job)
            self._lock.notify_all()
        if job.written is not None:
            job.written.result()
        return Staged(message.step)

    def write_out(self) -> None:
        """Wait until every staged save is durable on this rank or has failed."""
        self._background.remove_limit()
        with self._lock:
            self._lock.wait_for(lambda: not self._queue and self._current is None)

    def finish(self, commit_seconds: float) -> bool:
        """Write what is staged, wait up to `commit_seconds` for the other ranks' shards, then stop.

        Returns whether every save of this service was committed.
        """
        self.write_out()
        with self._lock:
            all_committed = self._lock.wait_for(lambda: not self._pending, commit_seconds)
            self._closing = True
            self._lock.notify_all()
        self._thread.join()
        return all_committed and not self._failures

    def abort(self) -> None:
        """Stop as a kill would, without writing what is staged."""
        with self._lock:
            self._closing = True
            for job in self._queue:
                job.slot.close()
                if job.written is not None:
                    job.written.set_exception(UnavailableError("the service has ended"))
            self._queue.clear()
            self._pending.clear()
            self._lock.notify_all()

    # ------------------------------------------------------------------ staging

    def _expect_writable(self) -> None:
        """Raise RefusedError if this process cannot write."""
        if self._error is not None:
            raise RefusedError(Refusal.BUSY, f"the writer has ended: {self._error!r}")
        if self._folder.options.read_only:
            raise RefusedError(
                Refusal.BAD_REQUEST,
                f"{self._folder.options.root} cannot be written by this process",
            )

    def _put_layout(self, job: _Job) -> None:
        digest = job.stage.layout
        if digest in self._digests and self._folder.tier.keep_layout(digest):
            return
        # Outside the `try` below: a missing layout does not mean that the folder is lost.
        layout = self._layouts.read(digest)
        self._digests[digest] = layout_digests(layout)
        try:
            self._folder.write(
                job.checkpoint, lambda: self._folder.tier.put_layout(layout), self._deleted_for(job)
            )
        except HoldfastError as error:
            # The process ends without a reply, so that the trainer stages the save again in the folder
            # that the next persister creates.
            self._end_if_lost(error)
            raise

    def _is_repeated(self, message: Stage) -> bool:
        """Return whether a save of this rank and step is queued, being written or durable."""
        jobs = self._queue if self._current is None else (*self._queue, self._current)
        identity = (message.rank, message.step, message.round)
        return any(job.is_of(message) for job in jobs) or any(
            (found.header.rank, found.header.step, found.header.round) == identity
            for found in self._folder.tier.list_shards()
        )

    def _was_made_durable(self, message: Stage, push: Push) -> bool:
        """Return whether an earlier persister has already made this save durable.

        It has then freed the slot and was killed before it reported the commit. This method schedules the
        commit and its report.
        """
        checkpoint = CheckpointId(message.step, message.round)
        committer = self._folder.committer
        if not (
            committer.is_prepared(checkpoint, message.rank) or committer.is_committed(checkpoint)
        ):
            return False
        self._await_commit(checkpoint, push)
        return True

    def _await_commit(self, checkpoint: CheckpointId, push: Push) -> None:
        with self._lock:
            self._pending.setdefault(checkpoint, _Pending(checkpoint)).pushes.append(push)
            self._lock.notify_all()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._work_once():
                pass
        except BaseException as error:
            logger.critical("the writer has ended, so nothing is saved", exc_info=True)
            self._fail_all(error)
            self._on_end(error)

    def _work_once(self) -> bool:
        """Write one staged save, if there is one, and commit what is complete. Return False at the end."""
        with self._lock:
            if not self._queue and not self._closing:
                self._lock.wait(_POLL_SECONDS if self._pending else None)
            if self._closing:
                return False
            self._current = self._queue.popleft() if self._queue else None
        if self._current is not None:
            self._save(self._current)
        self._commit_pending()
        with self._lock:
            self._current = None
            self._lock.notify_all()
        return True

    def _save(self, job: _Job) -> None:
        """Write a staged save. Any exception only fails this save, so that the thread continues."""
        try:
            try:
                self._write(job)
            except BaseException:
                if job.written is None:
                    job.slot.free()
                else:
                    job.slot.close()
                raise
            # The record is written first, so that a FREE slot without a record means a failed save.
            job.slot.free()
            failpoint("directory.slot_freed")
        except BaseException as error:  # noqa: BLE001 - it is logged, and the rank receives it
            _warn(error, "save of step %d failed: %s", job.stage.step)
            self._report_failed(job, error)
            self._end_if_lost(error)
        else:
            self._await_commit(job.checkpoint, job.push)
            if job.written is not None:
                job.written.set_result(None)

    def _write(self, job: _Job) -> None:
        folder, stage = self._folder, job.stage
        layout = self._digests[stage.layout]
        header = shard_header(stage, JOB_UID, folder.options.world_size)
        job.slot.throttle = self._background.take
        self._background.expect(
            bytes_each_step(stage.payload_bytes, self._interval_steps(stage), 0, None)
        )
        failpoint("directory.write_shard")
        deleted = self._deleted_for(job)
        try:
            record = folder.write(
                job.checkpoint, lambda: folder.tier.write_shard(header, job.slot), deleted
            )
        except AlreadyExistsError as error:
            raise saved_before(stage, error) from error
        folder.write(job.checkpoint, lambda: folder.committer.prepare(record, layout), deleted)

    def _interval_steps(self, stage: Stage) -> int:
        """Return the steps between saves: those of the policy, or since the last save of this rank."""
        last = self._last_steps.get(stage.rank)
        self._last_steps[stage.rank] = stage.step
        since_last = 0 if last is None else max(0, stage.step - last)
        return self._folder.options.policy.interval_steps or since_last

    def _commit_pending(self) -> None:
        """Commit complete checkpoints (on rank 0), report committed ones, prune, and fail older saves."""
        folder = self._folder
        for checkpoint in sorted(self._pending, key=age_of):
            try:
                if not self._commit(checkpoint):
                    continue
            except BaseException as error:  # noqa: BLE001 - it is logged, and the rank receives it
                _warn(error, "commit of %s failed: %s", checkpoint)
                self._give_up(checkpoint, "CommitFailed", describe(error))
                self._end_if_lost(error)
                continue
            self._report_committed(checkpoint)
            try:
                folder.expect_present()
                leader = folder.options.leads
                folder.committer.prune(checkpoint, self._protected, leader=leader)
            except BaseException as error:  # noqa: BLE001 - it is logged
                _warn(
                    error,
                    "pruning after %s failed, it is tried again after the next save: %s",
                    checkpoint,
                )

    def _commit(self, checkpoint: CheckpointId) -> bool:
        """Commit the checkpoint if this process leads and it is complete. Return whether it is committed."""
        failpoint("directory.before_commit")
        folder, committer = self._folder, self._folder.committer
        folder.expect_present()
        if folder.options.leads and committer.is_complete(checkpoint):
            folder.write(
                checkpoint,
                lambda: committer.commit(checkpoint),
                lambda gone: self._give_up_for_room(gone, checkpoint),
            )
        return committer.is_committed(checkpoint)

    # ------------------------------------------------------------------ outcomes

    def _report_committed(self, checkpoint: CheckpointId) -> None:
        """Report the checkpoint's levels, and fail older saves that not all ranks have finished."""
        pending = self._take_pending(checkpoint)
        if pending is not None:
            _push_all(pending, _levels(checkpoint, has_store=self._uploads is not None))
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

    def _deleted_for(self, job: _Job) -> Callable[[CheckpointId], None]:
        return lambda gone: self._give_up_for_room(gone, job.checkpoint)

    def _give_up_for_room(self, gone: CheckpointId, wanted: CheckpointId) -> None:
        self._give_up(gone, "NoRoom", f"it was deleted to make room for step {wanted.step}")

    def _give_up(self, checkpoint: CheckpointId, reason: str, text: str) -> None:
        pending = self._take_pending(checkpoint)
        if pending is not None:
            self._fail(pending, reason, text)

    def _take_pending(self, checkpoint: CheckpointId) -> _Pending | None:
        with self._lock:
            pending = self._pending.pop(checkpoint, None)
            self._lock.notify_all()
        return pending

    def _report_failed(self, job: _Job, error: BaseException) -> None:
        """Report a failed save by a message, or by the reply that waits: the rank then frees the slot."""
        if job.written is None:
            reason = type(error).__name__
            self._fail(_Pending(job.checkpoint, [job.push]), reason, describe(error))
        else:
            self._failures += 1
            job.written.set_exception(error)

    def _fail(self, pending: _Pending, reason: str, text: str) -> None:
        self._failures += 1
        _push_all(pending, [_failed(pending.checkpoint, Level.LOCAL, reason, text)])

    def _fail_all(self, error: BaseException) -> None:
        text = f"the writer has ended: {type(error).__name__}: {error}"
        with self._lock:
            self._error = error
            self._current = None
            queue, pending = tuple(self._queue), tuple(self._pending)
            self._queue.clear()
        for job in queue:
            job.slot.close()
            if job.written is None:
                self._fail(_Pending(job.checkpoint, [job.push]), "WriterEnded", text)
            else:
                job.written.set_exception(RefusedError(Refusal.BUSY, text))
        for checkpoint in pending:
            self._give_up(checkpoint, "WriterEnded", text)

    def _end_if_lost(self, error: BaseException) -> None:
        if self._folder.is_lost_by(error):
            self._on_folder_lost()


def describe(error: BaseException) -> str:
    """Return the text of an error for a message to the trainer.

    The text starts with the type, except for errors of Holdfast, which explain themselves.
    """
    text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_REASON_CHARACTERS]


def _push_all(pending: _Pending, messages: list[Any]) -> None:
    """Push messages to all waiting ranks. A failed push is only logged: the trainer stages again."""
    for push in pending.pushes:
        try:
            for message in messages:
                push(message)
        except BaseException:
            logger.exception("the outcome of %s was not sent to its rank", pending.checkpoint)


def _warn(error: BaseException, text: str, what: object) -> None:
    """Log a failure, with the traceback of an error that is not expected."""
    unexpected = not isinstance(error, HoldfastError | OSError)
    logger.warning(text, what, describe(error), exc_info=unexpected)


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
