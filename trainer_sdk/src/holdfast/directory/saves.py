"""The saves of one folder: the engine that a sidecar runs, over a folder, and the commits after it.

1. `stage` hands a slot to the engine (holdfast_core.save), which writes the staged slots one after the
   other: digest, shard, record of the shard. Then it frees the slot.
2. After each write, the checkpoints that are complete are committed and the ranks are told
   (`PendingCommits`), before the oldest slot that waits is written.

The engine runs on an event loop of its own thread, so that the threads of connections can call it. An
exception during a save or a commit fails that save and is reported to its rank. It does not end the thread.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.directory.choice import JOB_UID
from holdfast.directory.open_folder import OpenFolder
from holdfast_core.clock import SystemClock
from holdfast_core.errors import HoldfastError, RefusedError, UnavailableError
from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step, age_of
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    Ok,
    Refusal,
    Refused,
    Stage,
    StepOutcome,
)
from holdfast_core.pacing import BackgroundLimit, bytes_each_step
from holdfast_core.save.place import RankLayouts, SavePlace, SavePools
from holdfast_core.save.staging import Stager, WriteOutcome
from holdfast_core.shards.file import ShardHeader, ShardRecord
from holdfast_core.shm.slot_file import SlotFile

if TYPE_CHECKING:
    from holdfast.directory.uploads import FolderUploads


logger = logging.getLogger(__name__)

T = TypeVar("T")

Push = Callable[[Any], None]
_MAX_REASON_CHARACTERS = 2000


class PendingCommits:
    """The commits that this process waits for. Thread-safe; `commit_complete` runs in one thread at a time.

    `on_folder_lost` is called when the folder was deleted or unmounted.
    """

    def __init__(
        self, folder: OpenFolder, uploads: FolderUploads | None, on_folder_lost: Callable[[], None]
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

    def has_record(self, rank: Rank, checkpoint: CheckpointId) -> bool:
        """Return whether the rank's shard is durable with its record, or the checkpoint is committed."""
        committer = self._folder.committer
        return committer.is_prepared(checkpoint, rank) or committer.is_committed(checkpoint)

    def commit_complete(self) -> None:
        """Commit complete checkpoints (on rank 0), report committed ones, prune, and fail older saves.

        Every rank writes its saves in their order, and rank 0 commits them in it. The newest one is looked at
        first, so that a newer one is never found before what an older one still lacked a moment ago.
        """
        folder = self._folder
        newest_first = sorted(tuple(self._pending), key=age_of, reverse=True)
        for checkpoint in reversed([c for c in newest_first if self._is_due(c)]):
            try:
                if not self._commit(checkpoint):
                    continue
                self._report_committed(checkpoint)
            except BaseException as error:  # noqa: BLE001 - it is logged, and the rank receives it
                warn(error, "commit of %s failed: %s", checkpoint)
                self._give_up(checkpoint, "CommitFailed", describe(error))
                self.end_if_lost(error)
                continue
            try:
                folder.expect_present()
                folder.committer.prune(checkpoint, self._protected, leader=folder.options.leads)
            except BaseException as error:  # noqa: BLE001 - it is logged
                text = "pruning after %s failed, it is tried again after the next save: %s"
                warn(error, text, checkpoint)

    def deleted_for(self, wanted: CheckpointId) -> Callable[[CheckpointId], None]:
        """Return what to call with a checkpoint that was deleted to make room for `wanted`."""
        text = f"it was deleted to make room for step {wanted.step}"
        return lambda gone: self._give_up(gone, "NoRoom", text)

    def failed(self, pushes: Iterable[Push], failure: StepOutcome) -> None:
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

    def _is_due(self, checkpoint: CheckpointId) -> bool:
        """Return whether the checkpoint is committed, or can be by this process, or may never be."""
        folder, committer = self._folder, self._folder.committer
        with suppress(Exception):  # `_commit` raises it again, and the save fails
            folder.expect_present()
            complete = folder.options.leads and committer.is_complete(checkpoint)
            return complete or committer.is_committed(checkpoint)
        return True

    def _commit(self, checkpoint: CheckpointId) -> bool:
        """Commit the checkpoint if this process leads and it is complete. Return whether it is committed."""
        sys.audit("holdfast.directory.slot_freed")
        sys.audit("holdfast.directory.before_commit")
        folder, committer = self._folder, self._folder.committer
        folder.expect_present()
        if folder.options.leads and committer.is_complete(checkpoint):
            deleted = self.deleted_for(checkpoint)
            folder.write(checkpoint, lambda: committer.commit(checkpoint), deleted)
        return committer.is_committed(checkpoint)

    def _report_committed(self, checkpoint: CheckpointId) -> None:
        """Report the checkpoint's levels, and fail older saves that not all ranks have finished.

        Rank 0 may have committed an older one and pruned it since this process looked for it.
        """
        text = f"step {checkpoint.step} was committed before all ranks had saved this one"
        pending = sorted(tuple(self._pending), key=age_of)
        for other in [c for c in pending if age_of(c) < age_of(checkpoint)]:
            if self._folder.committer.was_pruned(other):
                self._report_committed(other)
            else:
                self._give_up(other, "Superseded", text)
        pushes = self._take(checkpoint)
        if pushes is not None:
            _push_all(pushes, _levels(checkpoint, has_store=self._uploads is not None))
        if self._uploads is not None:
            self._uploads.committed(checkpoint)

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
    reached = [StepOutcome(step, round_, level) for level in (Level.LOCAL, Level.REPLICATED)]
    if has_store:
        return reached
    text = "the folder has no object store; set Folder(store=...)"
    return [*reached, _failed(checkpoint, Level.PERSISTED, NO_OBJECT_TIER, text)]


def _failed(checkpoint: CheckpointId, level: Level, reason: str, text: str) -> StepOutcome:
    return StepOutcome(checkpoint.step, checkpoint.round, level, reason, text)


_Save = tuple[Rank, CheckpointId]

_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class FolderRound:
    """The round of this run, which does not change while its persister lives."""

    round: RestartRound
    own_ranks: range
    world_size: int
    waits_for_choice: bool = True

    def refusal(self, round_: RestartRound) -> Refused | None:
        if round_ < self.round:
            text = f"the request carries round {round_}, this folder is in round {self.round}"
            return Refused(Refusal.STALE_ROUND, text, self.round)
        if round_ > self.round:
            text = f"round {round_} has not begun in this folder, which is in round {self.round}"
            return Refused(Refusal.FUTURE_ROUND, text, self.round)
        return None


class _FolderReports:
    """Reports of the writes: the log, and the message to the rank."""

    def stored(self, stage: Stage, payload_bytes: int, seconds: float) -> None: ...

    def no_room(self, stage: Stage, error: Exception) -> None: ...

    def hangs(self, stage: Stage, text: str) -> None:
        logger.warning("%s", text)

    def continues(self, stage: Stage) -> None: ...

    def failed(self, stage: Stage, error: Exception) -> StepOutcome:
        warn(error, "save of step %d failed: %s", stage.step)
        return StepOutcome(
            stage.step, stage.round, Level.LOCAL, type(error).__name__, describe(error)
        )

    def dropped(self, steps: int) -> None: ...


class FolderSaves:
    """Runner of the engine for one folder. Thread-safe.

    `on_end` is called in the loop's thread with the exception that has ended it.
    """

    def __init__(
        self,
        folder: OpenFolder,
        background: BackgroundLimit,
        commits: PendingCommits,
        on_end: Callable[[BaseException], None],
    ) -> None:
        options = folder.options
        self._folder = folder
        self._background = background
        self._commits = commits
        self._on_end = on_end
        self.round = FolderRound(folder.round, options.own_ranks, options.world_size)
        self._pools = SavePools(1)
        self._layouts = RankLayouts(options.layouts_dir, folder.tier, self._pools)
        place = SavePlace(
            job_uid=JOB_UID,
            slots_dir=options.slots_dir,
            open_slot=folder.open_slot,
            ensure_layout=self._ensure_layout,
            write_shard=self._write_shard,
            has_stored=lambda message: commits.has_record(*_save_of(message)),
            list_shards=folder.tier.list_shards,
            notes=None,
        )
        self._stager = Stager(place, self._pools, _FolderReports(), background, SystemClock())
        self._stager.ended.subscribe(self._ended)
        self._pushes: dict[_Save, list[Push]] = {}
        """Whom to tell of the saves that are not durable yet."""
        self._unclaimed: dict[_Save, StepOutcome] = {}
        """Failures of saves whose `stage` has not returned yet."""
        self._last_steps: dict[Rank, Step] = {}
        self._lost_by: BaseException | None = None
        """The error of the last write."""
        self._woken = asyncio.Event()
        """Set when a write has ended or a durable save was staged again."""
        self._changed = asyncio.Event()
        self._stager.changed.subscribe(self._changed.set)
        self._loop = ServiceLoop("holdfast-save", self._main, self._loop_ended)

    def start(self) -> None:
        self._loop.start()

    def stage(self, message: Stage, push: Push) -> Ok:
        """Hand a full slot over. Return when the rank may rely on the levels.

        Args:
            message: What the rank sent.
            push: Sends later messages about the save to the rank.

        Raises:
            RefusedError: Nothing can be written, or the step was saved before with other bytes.
            FormatError: The slot contradicts the message.
            HoldfastError: The layout cannot be stored, or the slot not opened.
        """
        if self._loop.error is not None:
            raise RefusedError(Refusal.BUSY, f"the writer has ended: {self._loop.error!r}")
        if self._folder.options.read_only:
            raise RefusedError(
                Refusal.BAD_REQUEST,
                f"{self._folder.options.root} cannot be written by this process",
            )
        return self._loop.run(self._stage(message, push))

    def write_out(self) -> None:
        """Wait until every staged save is durable on this rank or has failed."""
        self._background.remove_limit()
        with suppress(UnavailableError):  # the loop has ended, so that nothing is written any more
            self._loop.run(self._written_out())

    def finish(self, commit_seconds: float) -> bool:
        """Write what is staged, wait up to `commit_seconds` for the other ranks' shards, then stop.

        Returns whether every save of this service was committed.
        """
        self.write_out()
        all_committed = self._commits.wait(commit_seconds)
        self._loop.stop()
        self._loop.join()
        return all_committed and not self._commits.failures

    def abort(self) -> None:
        """Stop as a kill would, without writing what is staged."""
        self._commits.abandon()
        self._loop.stop()

    # ------------------------------------------------------------------ the loop

    async def _main(self) -> None:
        self._stager.recover(self.round)
        while True:
            await self._serve()

    async def _serve(self) -> None:
        """Commit what is complete after the end of a write, then begin the oldest write that waits."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._commits.is_empty else _POLL_SECONDS):
                await self._woken.wait()
        self._woken.clear()
        if not self._commits.is_empty:
            await self._pools.shard.run(self._commits.commit_complete)
        if self._stager.idle:
            steps = [s for r in self.round.own_ranks for s in self._stager.waiting(Rank(r))]
            self._stager.choose(min(steps, default=None))

    async def _written_out(self) -> None:
        while self._stager.waits or not self._stager.idle:
            self._changed.clear()
            await self._changed.wait()
        # This also waits for a commit under way, with the pruning after it.
        await self._pools.shard.run(self._commits.commit_complete)

    def _loop_ended(self, error: BaseException | None) -> None:
        if error is not None:
            logger.critical("the writer has ended, so nothing is saved", exc_info=error)
            text = f"the writer has ended: {type(error).__name__}: {error}"
            for (_, checkpoint), pushes in self._pushes.items():
                self._commits.fail(checkpoint, pushes, "WriterEnded", text)
            self._commits.give_up_all("WriterEnded", text)
            self._on_end(error)
        self._stager.abandon()
        self._pools.close(wait=True)  # a call that ends later would report to a closed loop

    # ------------------------------------------------------------------ one save

    async def _stage(self, message: Stage, push: Push) -> Ok:
        save = _save_of(message)
        self._unclaimed.pop(save, None)
        await self._stager.stage(lambda: self.round, message)
        if message.step in self._stager.under_way(message.rank):
            pushes = self._pushes.setdefault(save, [])
            if push not in pushes:
                pushes.append(push)
        elif save in self._unclaimed:
            self._commits.failed([push], self._unclaimed.pop(save))
        else:  # it is durable already
            await self._pools.meta.run(self._record_again, message)
            self._commits.add(save[1], [push])
            self._woken.set()
        return Ok(message.round)

    def _ended(self, outcome: WriteOutcome) -> None:
        """Commit a save, or tell its rank that it has failed. Called on the loop."""
        save = _save_of(outcome.stage)
        pushes = self._pushes.pop(save, [])
        if outcome.failed is None:
            self._commits.add(save[1], pushes)
        elif pushes:
            self._commits.failed(pushes, outcome.failed)
        else:
            self._unclaimed[save] = outcome.failed
        if outcome.failed is not None and self._lost_by is not None:
            self._commits.end_if_lost(self._lost_by)
        self._woken.set()

    async def _ensure_layout(self, message: Stage) -> None:
        await self._layouts.ensure(message, partial(self._put_layout, message))

    # ------------------------------------------------------------------ in the threads of the pools

    def _put_layout(self, message: Stage, document: bytes) -> None:
        folder, checkpoint = self._folder, _save_of(message)[1]
        deleted = self._commits.deleted_for(checkpoint)
        try:
            folder.write(checkpoint, lambda: folder.tier.put_layout(document), deleted)
        except HoldfastError as error:
            # The process ends without a reply, so that the trainer stages the save again in the folder
            # that the next persister creates.
            self._commits.end_if_lost(error)
            raise

    def _write_shard(self, header: ShardHeader, slot: SlotFile) -> ShardRecord:
        """Write the shard and its record. Any exception fails only this save."""
        self._lost_by = None
        try:
            return self._write(header, slot)
        except BaseException as error:
            self._lost_by = error
            if isinstance(error, Exception):
                raise
            # SystemExit of a library would end the loop.
            raise UnavailableError(f"{type(error).__name__}: {error}") from error

    def _write(self, header: ShardHeader, slot: SlotFile) -> ShardRecord:
        folder = self._folder
        checkpoint = CheckpointId(header.step, header.round)
        self._background.expect(
            bytes_each_step(header.payload_bytes, self._interval_steps(header), 0, None)
        )
        sys.audit("holdfast.directory.write_shard")
        deleted = self._commits.deleted_for(checkpoint)
        record = folder.write(checkpoint, lambda: folder.tier.write_shard(header, slot), deleted)
        self._record(record, checkpoint)
        # The record is written before the slot is freed: a FREE slot without one is a failed save.
        return record

    def _record(self, record: ShardRecord, checkpoint: CheckpointId) -> None:
        folder, layout = self._folder, self._layouts.known[record.header.layout]
        deleted = self._commits.deleted_for(checkpoint)
        folder.write(checkpoint, lambda: folder.committer.prepare(record, layout), deleted)

    def _record_again(self, message: Stage) -> None:
        """Write the record of a durable shard, if an earlier persister was killed before it did."""
        rank, checkpoint = _save_of(message)
        if self._commits.has_record(rank, checkpoint):
            return
        for record in self._folder.tier.list_shards():
            if (record.header.rank, record.checkpoint) == (rank, checkpoint):
                self._record(record, checkpoint)

    def _interval_steps(self, header: ShardHeader) -> int:
        """Return the steps between saves: those of the policy, or since the last save of this rank."""
        last = self._last_steps.get(header.rank)
        self._last_steps[header.rank] = header.step
        since_last = 0 if last is None else max(0, header.step - last)
        return self._folder.options.policy.interval_steps or since_last


def _save_of(message: Stage) -> _Save:
    return message.rank, CheckpointId(message.step, message.round)


class ServiceLoop:
    """Thread that runs one coroutine on its event loop until `stop`, and what other threads pass to `run`.

    An exception that a task of the loop does not handle ends the loop, too.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[Any, Any, None]],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Create the loop, whose thread `start` starts.

        Args:
            name: Name of the thread.
            main: Returns the coroutine.
            on_end: Called in the thread, before the loop is closed, with the exception that has ended it.
        """
        self._main = main
        self._on_end = on_end
        self.error: BaseException | None = None
        """What has ended the loop."""
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._loop.set_exception_handler(self._task_failed)
        self._end: asyncio.Future[None] = self._loop.create_future()
        """Ends the loop: with a result if it was stopped, or with the exception of a task."""
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] | None = set()
        """Calls of `run` that have no result yet. None at the end, when the loop would not run them."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result. Raises UnavailableError if the loop has ended."""
        with self._lock:
            if self._calls is None:
                work.close()
                raise UnavailableError("the service has ended")
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        call.add_done_callback(self._called)
        try:
            return call.result()
        except CancelledError as error:
            raise UnavailableError("the service has ended") from error

    def stop(self) -> None:
        """Let the loop end. Its tasks are cancelled."""
        with self._lock:
            if self._calls is not None:
                self._loop.call_soon_threadsafe(self._finish, None)

    def join(self) -> None:
        self._thread.join()

    def _called(self, call: Future[Any]) -> None:
        with self._lock:
            if self._calls is not None:
                self._calls.discard(call)

    def _run(self) -> None:
        try:
            self._runner.run(self._until_end())
        except BaseException as found:  # noqa: BLE001 - it is passed on
            self.error = found
        with self._lock:
            calls, self._calls = self._calls or set(), None
        for call in calls:
            call.cancel()
        try:
            self._on_end(self.error)
        finally:
            self._runner.close()

    async def _until_end(self) -> None:
        main = asyncio.create_task(self._main())
        done, _ = await asyncio.wait({main, self._end}, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    def _finish(self, error: BaseException | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _task_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if isinstance(error := context.get("exception"), BaseException):
            self._finish(error)
