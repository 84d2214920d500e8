"""Answers the messages of a sidecar from a directory: restore, fill, stage, levels.

One instance serves one rank (`holdfast.directory.persister`), or all ranks of a test. Connection threads
call it, and one worker thread writes and commits in order. An exception during a save fails that save and
is reported to its rank. It does not end the thread or the service.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

from holdfast.base.layouts import LayoutFiles
from holdfast.directory.choice import JOB_UID, Choice, choose, load_choice, next_round
from holdfast.directory.commit import Committer
from holdfast.directory.connection import describe
from holdfast.directory.options import ServiceOptions
from holdfast.directory.presence import Presence, expect_not_unmounted, says_gone
from holdfast.directory.resharding import assemble_payload
from holdfast.directory.rounds import claim_round, has_rounds, keep_round
from holdfast_core.errors import (
    CapacityError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.failpoint import failpoint
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import CheckpointId, Digest, Level, RestartRound, ShardRef, TierName
from holdfast_core.messages.schema import (
    Fill,
    Filled,
    HelloReply,
    LevelReached,
    Progress,
    Refusal,
    Restore,
    RestorePoint,
    RestoreReply,
    SaveFailed,
    ShardFile,
    SlotOffer,
    Stage,
    Staged,
)
from holdfast_core.node.files import disk_errors
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing.background import Pacing, bytes_each_step
from holdfast_core.shm.slot_check import slot_holds
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.shm.slot_header import SlotHeader, SlotState
from holdfast_core.tiers.base import ShardHeader

logger = logging.getLogger(__name__)

T = TypeVar("T")
Push = Callable[[Any], None]

_POLL_SECONDS = 0.01


@dataclasses.dataclass(slots=True)
class _Pending:
    """A save that is durable on this rank and waits for its commit."""

    checkpoint: CheckpointId
    pushes: list[Push] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A staged save. Its slot stays open, because a rank of the next run may replace the file of its name."""

    stage: Stage
    slot: SlotFile
    push: Push


class DirectoryService:
    """Service over one directory. Call `start` before anything else, and `finish` at the end."""

    def __init__(
        self,
        options: ServiceOptions,
        on_worker_end: Callable[[BaseException], None] = lambda error: None,
        on_folder_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a service.

        Args:
            options: Directory, ranks and policy.
            on_worker_end: Called in the worker thread when an exception has ended it.
            on_folder_lost: Called when the folder was deleted or unmounted. A new service must be started,
                which opens the folder again.
        """
        self._options = options
        self._on_worker_end = on_worker_end
        self._on_folder_lost = on_folder_lost
        self._presence: Presence | None = None
        self._worker_error: BaseException | None = None
        self._failures = 0
        self._layouts = LayoutFiles(options.layouts_dir)
        self._tier = DiskNodeTier(
            options.root / "tier",
            fill_limit=1.0,
            read_only=options.read_only,
            name="folder",
            advice="free space in its file system, or keep fewer checkpoints (keep_last)",
        )
        self._pacing = Pacing(options.slots_dir)
        self._lock = threading.Condition()
        self._queue: collections.deque[_Job] = collections.deque()
        self._pending: dict[CheckpointId, _Pending] = {}
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._choice: Choice | None = None
        self._choice_error: HoldfastError | None = None
        self._committer: Committer | None = None
        self.round = RestartRound(0)

    def start(self) -> None:
        """Open the directory, determine the round and the restore point, and start the worker thread.

        Raises CorruptionError or UnavailableError (see `choose`), and TierError.
        """
        options = self._options
        if options.round is not None and not has_rounds(options.root / "rounds"):
            expect_not_unmounted(options.root, options.device)
        self._tier.open()
        if not options.read_only:
            self._presence = Presence.of(options.root / "tier")
        committer = Committer(
            self._tier,
            options.root / "prepared",
            options.world_size,
            options.own_ranks,
            options.policy.keep_last,
            options.run_id,
        )
        self.round = self._take_round(committer)
        if options.choose_restore:
            if not options.read_only:
                committer.commit_left()
            self._choice = choose(self._tier, options.rejected)
        elif options.restore is not None:
            try:
                self._choice = load_choice(self._tier, options.restore)
            except (NotFoundError, CorruptionError) as error:
                # Another run pruned it after rank 0 had chosen it. `_restore` raises this error, so that
                # all ranks choose again.
                self._choice_error = error
        parent = None if self._choice is None else self._choice.digest
        self._committer = dataclasses.replace(committer, parent=parent)
        self._pacing.begin()
        self._thread = threading.Thread(target=self._work, name="holdfast-write", daemon=True)
        self._thread.start()

    def _take_round(self, committer: Committer) -> RestartRound:
        options, directory = self._options, self._options.root / "rounds"
        if options.round is None:
            lowest = next_round(self._tier, committer.rounds)
            if options.read_only:
                return lowest
            with disk_errors(f"taking a round in {directory}"):
                return claim_round(directory, lowest, options.run_id)
        if self._leads and not options.read_only:
            with disk_errors(f"keeping round {options.round} in {directory}"):
                keep_round(directory, options.round, options.run_id)
        return options.round

    @property
    def current_round(self) -> RestartRound:
        return self.round

    @property
    def restore_point(self) -> RestorePoint:
        if self._choice is None:
            return RestorePoint()
        manifest = self._choice.manifest
        return RestorePoint(manifest.step, manifest.restart_round, self._choice.digest)

    def write_out(self) -> None:
        """Wait until every staged save is durable on this rank or has failed."""
        self._pacing.hurry()
        with self._lock:
            self._lock.wait_for(lambda: not self._queue and not self._busy)

    def finish(self, commit_seconds: float) -> bool:
        """Write what is staged, wait up to `commit_seconds` for the other ranks' shards, then stop.

        Returns whether every save of this service was committed.
        """
        self.write_out()
        with self._lock:
            all_committed = self._lock.wait_for(lambda: not self._pending, commit_seconds)
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
        return all_committed and not self._failures

    def abort(self) -> None:
        """Stop as a kill would, without writing what is staged."""
        with self._lock:
            self._closing = True
            for job in self._queue:
                job.slot.close()
            self._queue.clear()
            self._pending.clear()
            self._lock.notify_all()

    # ------------------------------------------------------------------ messages

    def handle(self, message: Any, push: Push) -> Any:
        """Answer a request and return the reply.

        Args:
            message: Restore, Fill or Stage.
            push: Sends later messages about a staged save to its rank.

        Raises:
            StaleRoundError: The request is of an older round.
            HoldfastError: The request cannot be served.
        """
        match message:
            case Restore():
                self._fence(message.round)
                return self._restore(message)
            case Fill():
                self._fence(message.round)
                return self._fill(message)
            case Stage():
                self._fence(message.round)
                return self._stage(message, push)
            case _:
                raise RefusedError(
                    Refusal.BAD_REQUEST, f"{type(message).__name__} is not served by a directory"
                )

    def progressed(self, message: Progress) -> None:
        """Record a finished step: writing slows down where it delays training steps."""
        if message.rank == self._options.own_ranks[0]:
            self._pacing.step_done(message.step, message.blocked_seconds)

    def hello_reply(self) -> HelloReply:
        return HelloReply(self.round, self._options.policy)

    def _fence(self, round_: RestartRound) -> None:
        if round_ < self.round:
            raise StaleRoundError(
                f"the request carries round {round_}, this directory is in round {self.round}",
                own_round=self.round,
            )
        if round_ > self.round:
            raise RefusedError(
                Refusal.FUTURE_ROUND, f"round {round_} has not begun here, it is {self.round}"
            )

    def _restore(self, message: Restore) -> RestoreReply:
        if self._choice_error is not None:
            raise self._choice_error
        if self._choice is None:
            return RestoreReply(RestorePoint())
        manifest = self._choice.manifest
        same = manifest.world_size == self._options.world_size
        return RestoreReply(
            self.restore_point,
            payload_bytes=manifest.shards[message.rank].payload_bytes if same else 0,
            world_size=manifest.world_size,
            rank_layout=self._give_rank_layout(manifest.ref(message.rank)) if same else None,
            layout=None if same and not message.with_layout else self._give_layout(manifest.layout),
        )

    def _give_layout(self, digest: Digest) -> Digest:
        self._layouts.ensure(self._tier.get_layout(digest), digest)
        return digest

    def _give_rank_layout(self, ref: ShardRef) -> Digest | None:
        record = self._tier.find(ref)
        try:
            return None if record is None else self._give_layout(record.header.layout)
        except (NotFoundError, CorruptionError) as error:
            # The rank can do without it: it fetches its shard as saved and compares shapes as it loads.
            logger.warning("the layout of %s: %s", ref, error)
            return None

    def _fill(self, message: Fill) -> Filled | ShardFile:
        if self._choice is None:
            raise RefusedError(Refusal.NOT_FOUND, "there is nothing to restore in this round")
        manifest = self._choice.manifest
        if message.layout is not None:
            return self._fill_resharded(message, manifest, message.layout)
        if manifest.world_size != self._options.world_size:
            raise RefusedError(
                Refusal.BAD_REQUEST,
                f"checkpoint {manifest.checkpoint} was saved by {manifest.world_size} ranks, this is "
                f"one of {self._options.world_size}: say the layout that is wanted",
            )
        shard = manifest.shards[message.rank]
        ref = manifest.ref(message.rank)
        size = shard.payload_bytes
        held = [offer.name for offer in message.slots if self._may_hold(offer, ref, size)]
        if message.reads_files:
            path = str(self._tier.shard_path(ref))
            return ShardFile(path, ref, TierName.NODE, held[0] if held else None)
        for name in held:
            if self._holds(name, ref, size):
                return Filled(name, size, TierName.MEMORY)
        offer = _fitting(message.slots, shard.payload_bytes)
        slot = self._slot(offer.name)
        try:
            with self._tier.open_shard(ref) as reader:
                # The header names no step until the payload is complete.
                slot.write_header(SlotHeader(SlotState.FILLING, message.rank, offer.capacity_bytes))
                offset = 0
                with closing(reader.read_payload()) as pieces:
                    for piece in pieces:
                        slot.write_payload(offset, piece)
                        offset += len(piece)
            slot.write_header(
                SlotHeader(
                    SlotState.FREE,
                    message.rank,
                    offer.capacity_bytes,
                    manifest.restart_round,
                    manifest.step,
                    shard.payload_bytes,
                )
            )
        except CorruptionError as error:
            self._tier.quarantine(ref, str(error))
            raise
        finally:
            slot.close()
        return Filled(offer.name, shard.payload_bytes, TierName.NODE)

    def _fill_resharded(self, message: Fill, manifest: Manifest, layout: Digest) -> Filled:
        wanted = parse_rank_layout(self._layouts.read(layout))
        if wanted.rank != message.rank:
            raise FormatError(f"fill of rank {message.rank}: the layout is of rank {wanted.rank}")
        offer = _fitting(message.slots, wanted.payload_bytes)
        slot = self._slot(offer.name)
        try:
            # The header names no step, because an assembled payload is not a shard of any step.
            slot.write_header(SlotHeader(SlotState.FILLING, message.rank, offer.capacity_bytes))
            read = assemble_payload(self._tier, manifest, wanted, slot)
            slot.write_header(SlotHeader(SlotState.FREE, message.rank, offer.capacity_bytes))
        finally:
            slot.close()
        logger.info("rank %d: %d bytes read for %d", wanted.rank, read, wanted.payload_bytes)
        return Filled(offer.name, wanted.payload_bytes, TierName.NODE)

    def _slot(self, name: str) -> SlotFile:
        """Open a slot in the slots' directory or in the spare one. Raises FormatError, UnavailableError.

        A missing slot does not raise NotFoundError, because ranks would then reject the checkpoint.
        """
        spare = self._options.spare_slots_dir
        try:
            return SlotFile.open(self._options.slots_dir, name)
        except NotFoundError as error:
            if spare is None:
                raise UnavailableError(str(error)) from error
        try:
            return SlotFile.open(spare, name)
        except NotFoundError as error:
            raise UnavailableError(f"{error}, nor in {self._options.slots_dir}") from error

    def _may_hold(self, offer: SlotOffer, ref: ShardRef, payload_bytes: int) -> bool:
        """Return whether the slot's header names this shard. The payload is not verified."""
        with closing(self._slot(offer.name)) as slot:
            try:
                header = slot.header()
            except FormatError:
                return False
            found = (header.state, header.step, header.round, header.payload_bytes)
            return found == (SlotState.FREE, ref.step, ref.round, payload_bytes)

    def _holds(self, name: str, ref: ShardRef, payload_bytes: int) -> bool:
        """Return whether the slot's payload is this shard, verified."""
        with closing(self._slot(name)) as slot:
            try:
                return slot_holds(slot, self._tier, ref, payload_bytes)
            except FormatError:
                return False  # the file is shorter than its header says

    def _stage(self, message: Stage, push: Push) -> Staged:
        with self._lock:
            if self._worker_error is not None:
                raise RefusedError(Refusal.BUSY, f"the writer has ended: {self._worker_error!r}")
            if self._options.read_only:
                raise RefusedError(
                    Refusal.BAD_REQUEST, f"{self._options.root} cannot be written by this process"
                )
            if any(job.stage == message for job in self._queue):
                return Staged(message.step)
        try:
            slot = self._slot(message.slot)
        except UnavailableError:
            if self._was_made_durable(message, push):
                return Staged(message.step)
            raise
        try:
            header = slot.header()
            found = (header.state, header.round, header.step, header.payload_bytes)
            ready = (SlotState.FULL, SlotState.OWNED)
            wanted = (message.round, message.step, message.payload_bytes)
            if header.state not in ready or found[1:] != wanted:
                if self._was_made_durable(message, push):
                    slot.close()
                    return Staged(message.step)
                raise FormatError(
                    f"slot {message.slot}: state, round, step, bytes are {found}, the message says "
                    f"{wanted}"
                )
            checkpoint = CheckpointId(message.step, message.round)
            # Outside the `try` below: a missing layout does not mean that the folder is lost.
            layout = self._layouts.read(message.layout)
            try:
                self._expect_folder()
                self._with_room(checkpoint, lambda: self._tier.put_layout(layout))
            except HoldfastError as error:
                if says_gone(error) or self._is_lost():
                    # The process ends without a reply, so that the trainer stages the save again in the
                    # folder that the next persister creates.
                    self._on_folder_lost()
                raise
            slot.set_state(SlotState.OWNED)
        except BaseException:
            slot.close()
            raise
        with self._lock:
            self._queue.append(_Job(message, slot, push))
            self._lock.notify_all()
        return Staged(message.step)

    def _was_made_durable(self, message: Stage, push: Push) -> bool:
        """Return whether an earlier persister has already made this save durable.

        It has then freed the slot and was killed before it reported the commit. This method schedules the
        commit and its report.
        """
        checkpoint = CheckpointId(message.step, message.round)
        committer = self._committer
        if committer is None or not (
            committer.is_prepared(checkpoint, message.rank) or committer.is_committed(checkpoint)
        ):
            return False
        self._await_commit(checkpoint, push)
        return True

    def _await_commit(self, checkpoint: CheckpointId, push: Push) -> None:
        with self._lock:
            self._pending.setdefault(checkpoint, _Pending(checkpoint)).pushes.append(push)
            self._lock.notify_all()

    # ------------------------------------------------------------------ the worker

    def _work(self) -> None:
        try:
            while self._work_once():
                pass
        except BaseException as error:
            logger.critical("the writer has ended, nothing is saved any more", exc_info=True)
            self._fail_all(error)
            self._on_worker_end(error)

    def _work_once(self) -> bool:
        """Write one staged save, if there is one, and commit what is complete. Return False at the end."""
        with self._lock:
            if not self._queue and not self._closing:
                self._lock.wait(_POLL_SECONDS if self._pending else None)
            if self._closing:
                return False
            job = self._queue.popleft() if self._queue else None
            self._busy = job is not None
        if job is not None:
            self._write(job)
        self._advance()
        with self._lock:
            self._busy = False
            self._lock.notify_all()
        return True

    def _fail_all(self, error: BaseException) -> None:
        text = f"the writer has ended: {type(error).__name__}: {error}"
        with self._lock:
            self._worker_error = error
            self._busy = False
            queue, pending = tuple(self._queue), tuple(self._pending)
            self._queue.clear()
        for job in queue:
            job.slot.close()
            checkpoint = CheckpointId(job.stage.step, job.stage.round)
            self._fail(_Pending(checkpoint, [job.push]), "WriterEnded", text)
        for checkpoint in pending:
            self._give_up(checkpoint, "WriterEnded", text)

    def _write(self, job: _Job) -> None:
        """Write a staged save. Any exception only fails this save, so that the thread continues."""
        stage, slot = job.stage, job.slot
        checkpoint = CheckpointId(stage.step, stage.round)
        try:
            try:
                self._write_shard(stage, slot)
            finally:
                # The record is written first, so that a FREE slot without a record means a failed save.
                slot.set_state(SlotState.FREE)
                slot.close()
            failpoint("directory.slot_freed")
        except BaseException as error:
            logger.warning(
                "save of step %d failed: %s",
                stage.step,
                describe(error),
                exc_info=_unexpected(error),
            )
            self._fail(_Pending(checkpoint, [job.push]), type(error).__name__, describe(error))
            if says_gone(error) or self._is_lost():
                self._on_folder_lost()
        else:
            self._await_commit(checkpoint, job.push)

    def _write_shard(self, stage: Stage, slot: SlotFile) -> None:
        header = ShardHeader(
            JOB_UID,
            stage.round,
            stage.step,
            stage.rank,
            self._options.world_size,
            stage.layout,
            stage.payload_bytes,
        )
        slot.throttle = self._pacing.take
        self._pacing.expect(
            bytes_each_step(stage.payload_bytes, self._options.policy.interval_steps, 0, None)
        )
        failpoint("directory.write_shard")
        self._expect_folder()
        checkpoint, committer = CheckpointId(stage.step, stage.round), self._committer
        record = self._with_room(checkpoint, lambda: self._tier.write_shard(header, slot))
        if committer is not None:
            self._with_room(checkpoint, lambda: committer.prepare(record))

    def _with_room(self, wanted: CheckpointId, write: Callable[[], T]) -> T:
        """Call `write`. While the folder is full, delete an old item and call it again.

        Raises CapacityError when nothing may be deleted any more.
        """
        while True:
            try:
                return write()
            except CapacityError as error:
                point = None if self._choice is None else self._choice.manifest.checkpoint
                gone = None if self._committer is None else self._committer.make_room(wanted, point)
                if gone is None:
                    raise CapacityError(
                        f"{self._options.root} has no room for step {wanted.step}, and nothing in it may "
                        f"be deleted: the newest checkpoint stays ({error})"
                    ) from error
                logger.warning(
                    "%s has no room for step %d: %s was deleted, although keep_last is %d. Free space in "
                    "its file system, or keep fewer checkpoints",
                    self._options.root,
                    wanted.step,
                    gone,
                    self._options.policy.keep_last,
                )
                self._give_up(gone, "NoRoom", f"it was deleted to make room for step {wanted.step}")

    def _is_lost(self) -> bool:
        return self._presence is not None and self._presence.is_lost()

    def _expect_folder(self) -> None:
        if self._is_lost():
            raise NotFoundError(
                f"{self._options.root}: the folder that this run opened is not there any more; it was "
                "deleted or unmounted"
            )

    def _advance(self) -> None:
        """Commit complete checkpoints (on rank 0), report committed ones, prune, and fail older saves."""
        committer = self._committer
        if committer is None:
            return
        for checkpoint in sorted(self._pending, key=lambda c: (c.round, c.step)):
            try:
                if not self._commit(committer, checkpoint):
                    continue
            except BaseException as error:
                logger.warning(
                    "commit of %s failed: %s",
                    checkpoint,
                    describe(error),
                    exc_info=_unexpected(error),
                )
                self._give_up(checkpoint, "CommitFailed", describe(error))
                if says_gone(error) or self._is_lost():
                    self._on_folder_lost()
                continue
            self._conclude(checkpoint, _levels(checkpoint))
            self._forget_older(checkpoint)
            try:
                self._expect_folder()
                point = None if self._choice is None else self._choice.manifest.checkpoint
                committer.prune(checkpoint, point, leader=self._leads)
            except BaseException as error:
                logger.warning(
                    "pruning after %s failed, it is tried again after the next save: %s",
                    checkpoint,
                    describe(error),
                    exc_info=_unexpected(error),
                )

    @property
    def _leads(self) -> bool:
        return 0 in self._options.own_ranks

    def _commit(self, committer: Committer, checkpoint: CheckpointId) -> bool:
        """Commit the checkpoint if this process leads and it is complete. Return whether it is committed."""
        failpoint("directory.before_commit")
        self._expect_folder()
        if self._leads and committer.is_complete(checkpoint):
            self._with_room(checkpoint, lambda: committer.commit(checkpoint))
        return committer.is_committed(checkpoint)

    def _forget_older(self, newest: CheckpointId) -> None:
        for checkpoint in list(self._pending):
            if (checkpoint.round, checkpoint.step) < (newest.round, newest.step):
                text = f"step {newest.step} was committed before all ranks had saved this one"
                self._give_up(checkpoint, "Superseded", text)

    def _conclude(self, checkpoint: CheckpointId, messages: list[Any]) -> None:
        with self._lock:
            pending = self._pending.pop(checkpoint, None)
            self._lock.notify_all()
        if pending is not None:
            _push_all(pending, messages)

    def _give_up(self, checkpoint: CheckpointId, reason: str, text: str) -> None:
        with self._lock:
            pending = self._pending.pop(checkpoint, None)
            self._lock.notify_all()
        if pending is not None:
            self._fail(pending, reason, text)

    def _fail(self, pending: _Pending, reason: str, text: str) -> None:
        self._failures += 1
        _push_all(pending, [_failed(pending.checkpoint, Level.LOCAL, reason, text)])


def _push_all(pending: _Pending, messages: list[Any]) -> None:
    """Push messages to all waiting ranks. A failed push is only logged: the trainer stages again."""
    for push in pending.pushes:
        try:
            for message in messages:
                push(message)
        except BaseException:
            logger.exception("what became of %s could not be told", pending.checkpoint)


def _unexpected(error: BaseException) -> bool:
    """Return whether the error is unexpected, so that the log needs a traceback."""
    return not isinstance(error, HoldfastError | OSError)


def _levels(checkpoint: CheckpointId) -> list[Any]:
    """Return the messages for a committed checkpoint.

    A directory holds one copy and has no object tier. A local checkpoint therefore counts as replicated
    and is never persisted.
    """
    step, round_ = checkpoint.step, checkpoint.round
    return [
        LevelReached(step, round_, Level.LOCAL),
        LevelReached(step, round_, Level.REPLICATED),
        _failed(checkpoint, Level.PERSISTED, "NoObjectTier", "a directory has no object tier"),
    ]


def _failed(checkpoint: CheckpointId, level: Level, reason: str, text: str) -> SaveFailed:
    return SaveFailed(checkpoint.step, checkpoint.round, level, reason, text)


def _fitting(offers: Sequence[SlotOffer], payload_bytes: int) -> SlotOffer:
    for offer in offers:
        if offer.capacity_bytes >= payload_bytes:
            return offer
    raise RefusedError(
        Refusal.BAD_REQUEST, f"no offered slot holds the {payload_bytes} bytes of the shard"
    )
