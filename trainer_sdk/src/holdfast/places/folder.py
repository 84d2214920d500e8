"""The place of a folder. Each rank starts a persister, which ends after the connection has ended."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import socket
import subprocess
import sys

from holdfast.base.handle import SaveHandle
from holdfast.base.options import Folder, Options, folder_path, required_store
from holdfast.base.settings import RankSettings
from holdfast.connection.link import PERSISTER_PAUSE_SECONDS, Link, OwnSocket
from holdfast.connection.session import Session
from holdfast.directory.choice import JOB_UID, committed, older_than, refuse_old_layout
from holdfast.directory.commit import delete_step
from holdfast.directory.open_folder import UPLOAD_SECONDS, ServiceOptions, format_options
from holdfast.directory.processes import (
    Claim,
    Presence,
    Process,
    TrainingLock,
    claim,
    claim_checkpoint,
    device_of,
    wait_for_writers,
)
from holdfast.gang.store import GangStore
from holdfast.places.folder_start import FolderStart, expect_shared
from holdfast.places.place import Directories, NextFetch, Traits, wait_connected
from holdfast.places.slot_directory import SlotDirectory
from holdfast.reading.opening import Checkpoints, SavedStep, open_checkpoints
from holdfast.slots.capacity import IN_A_FOLDER
from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    HoldfastError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.ids import RestartRound, Step, TierName
from holdfast_core.messages.schema import (
    Ok,
    Policy,
    Refusal,
    Restore,
    RestorePoint,
    RestoreReply,
    TakeStore,
)
from holdfast_core.node.files import make_directories


class PersisterProcess:
    """The newest persister of this rank."""

    def __init__(self) -> None:
        self.exit_status: int | None = None
        """Exit status of the last persister that another one replaced."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """End the persister, if one runs."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self.exit_status = self._process.wait()
            self._process = None

    def start(self, options: str) -> socket.socket:
        """Start a persister with `options` and return the socket to it. Raises OSError."""
        plain, theirs = socket.socketpair()
        ours = OwnSocket.of(plain)
        command = [sys.executable, "-m", "holdfast.directory.persister"]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), options],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # A launcher kills a rank's process group, and a terminal interrupts it. The
                    # persister must survive both to write what was staged.
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        return ours

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the persister to end. Return whether none is left."""
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self._process = None
        return True


logger = logging.getLogger(__name__)

_DEFAULT_INTERVAL_STEPS = 100
_SETTLE_SECONDS = 120.0
_LEAVE_SECONDS = 120.0
_LEAVE_STORE_SECONDS = UPLOAD_SECONDS + 60.0
_LEAVE_AFTER_ERROR_SECONDS = 5.0
_STARTS = 5
"""Starts of a persister that end before it answers, after which the restore fails."""
_STARTING_SECONDS = 5.0
"""The least time for these starts: memory or descriptors may be short for a moment."""


class FolderPlace:
    """A folder, and the persister of this rank. The folder is created if it does not exist.

    Args:
        folder: The folder, and what is kept in it.
        options: What else the script passed to the Checkpointer.
        settings: Environment of this rank.

    Raises:
        ConfigError: The folder cannot be created or has an unsupported layout, or `slots_dir` cannot be
            written.
    """

    def __init__(self, folder: Folder, options: Options, settings: RankSettings) -> None:
        root = folder_path(folder.path)
        try:
            make_directories(root)
        except OSError as error:
            # If the folder exists, only the fsync of its parent failed, which is harmless.
            if not root.is_dir():
                raise ConfigError(f"Folder({str(root)!r}): {error}") from error
        refuse_old_layout(root)
        asked = options.interval_steps if options.timing is None else 0
        interval = _DEFAULT_INTERVAL_STEPS if asked is None else asked
        self._policy = Policy(interval, folder.slots, folder.keep_last, peer_copies=0)
        self.traits = Traits(
            job_uid=JOB_UID,
            peer=f"the process that writes to {root}",
            slots=folder.slots,
            advice=IN_A_FOLDER,
            interval_steps=interval,
            round=None,
            has_nothing=False,
            knows_what_is_durable=True,
            frees_older_steps=False,
            shares_container=True,
            timing=options.timing,
        )
        self._root = root
        self._name = str(folder.path)
        self._settings = settings
        self._is_read_only = not all(
            os.access(p, os.W_OK) for p in (root, root / "tier") if p.exists()
        )
        self._memory = SlotDirectory.of_folder(
            root, settings, folder.slots_dir, is_read_only=self._is_read_only
        )
        self._raises_on_damage = folder.on_damage == "raise"
        self._start = FolderStart(
            root,
            settings,
            keep_last=folder.keep_last,
            is_read_only=self._is_read_only,
            raises_on_damage=self._raises_on_damage,
        )
        self._training = TrainingLock(root, self._start.expect_nothing_newer)
        self._may_save = False
        self._takes = itertools.count()
        """Numbers of the attempts to get the right to save: no rank may read the answer to an older one."""
        self._object_store = None if folder.store is None else required_store(folder.store)
        self._store_keep_last = folder.store_keep_last
        self._session: Session | None = None
        self._persister = PersisterProcess()
        self._processes = root / "processes"
        self._store: GangStore | None = None
        self._restore_point: Claim | None = None
        self._lost_fetches = 0
        """Fetches in a row that ended with the connection."""
        self._device: int | None = None
        """Device number of the folder's file system when the folder was opened."""
        self._opened: Presence | None = None
        self._claim: Claim | None = None

    @property
    def where_to_look(self) -> str:
        number = "" if self._persister.pid is None else f" (process {self._persister.pid})"
        return (
            f"check that {self._root} is mounted, writable and has free space, and check the "
            f"standard error of the process that writes to it{number}"
        )

    @property
    def location(self) -> str:
        return self._name

    @property
    def run_id(self) -> str:
        return self._start.kept_run_id

    def open(self, store: GangStore | None) -> Directories:
        """Wait for the writers of an ended run (rank 0 only), and acquire a directory for slots.

        Raises ConfigError on every rank if the nodes of the gang do not share the folder.
        """
        self._store = store
        expect_shared(self._root, self._settings, store)
        self._device = device_of(self._root)
        if self._root.is_dir():
            self._opened = Presence.of(self._root)
        if self._settings.rank == 0:
            wait_for_writers(self._processes)
            self._report_other_training()
        self._memory.open()
        return self._memory.directories

    def holds_slots(self) -> bool:
        return self._memory.is_held()

    def close(self, *, wait: bool) -> None:
        longest = _LEAVE_SECONDS if self._object_store is None else _LEAVE_STORE_SECONDS
        ended = self._persister.wait(longest if wait else _LEAVE_AFTER_ERROR_SECONDS)
        if not ended:
            logger.warning(
                "%s: the last saves are still being written; the next run waits for them",
                self._root,
            )
        self._give_up_claim()
        self._memory.close(has_readers=not ended)
        self._training.release()
        if self._restore_point is not None:
            self._restore_point.release()
            self._restore_point = None

    # ------------------------------------------------------------------ restore

    def start(self, session: Session) -> None:
        self._session = session

        def join(round_: RestartRound) -> None:
            session.round = round_
            self._open_link(session)

        def choose() -> tuple[RestartRound, RestorePoint, str | None]:
            session.round = None
            round_ = self._open_link(session)
            reply: RestoreReply = session.request(
                Restore(round_, self._settings.rank), RestoreReply
            )
            return (
                round_,
                reply.restore_point,
                self._passed_over(reply) or self._replaced(reply),
            )

        try:
            refused = self._start.agree(self._store, join, choose)
            if refused is not None and self._start.round is None:
                # The script may catch the error. Its saves and restores need a round in which all ranks are.
                session.close()
                self._start.agree(self._store, join, choose)
        except BaseException:
            session.close()  # like the other ranks', so that all of them begin the next round together
            raise
        self._hold_restore_point()
        if refused is not None:
            try:
                raise refused
            finally:
                # The error refers to this frame by its traceback. If the frame referred to the error, the
                # state would stay in memory until the next garbage collection.
                del refused

    def reason_to_give_up(self, session: Session, waited_seconds: float) -> HoldfastError | None:
        """Return why the persister cannot be expected to answer. A folder's disk may be slow."""
        refusal = session.hello_error
        if isinstance(refusal, RefusedError) and refusal.code == Refusal.BUSY:
            return UnavailableError(f"{self._root}: {refusal}")
        if isinstance(refusal, RefusedError) and refusal.code == Refusal.BAD_REQUEST:
            return ConfigError(f"{self._root}: {refusal}")
        if refusal is not None:
            return CorruptionError(f"{self._root}: {refusal}")
        if waited_seconds < _STARTING_SECONDS or session.losses < _STARTS:
            return None
        ended = ""
        if (status := self._persister.exit_status) is not None:
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            ended = f" (the process before ended with {how}; its standard error has the reason)"
        return UnavailableError(
            f"{self.traits.peer} has not replied, and the connection was lost {session.losses} "
            f"times in a row: {session.lost_because}{ended}"
        )

    def after_fetch(self, step: Step | None, error: HoldfastError | None) -> NextFetch:
        is_lost = isinstance(error, UnavailableError) and self._has_link()
        self._lost_fetches = self._lost_fetches + 1 if is_lost else 0
        if error is not None and not _is_bad_copy(error):
            # A persister that ends at each fetch would do so forever.
            return NextFetch.REPEAT if 0 < self._lost_fetches < _STARTS else NextFetch.FAIL
        return self._start.after_fetch(self._store, step, error)

    def roll_back(self, session: Session, step: Step | None) -> None:
        session.wait_settled(_SETTLE_SECONDS)
        self._start.roll_back(self._store, step)

    def describe(self, step: Step, tier: str) -> str:
        """Name the folder or its store. Rank 0, which tells the user, adds how many older ones there are."""
        if tier == TierName.OBJECT and self._object_store is not None:
            return str(self._object_store)
        if self._settings.rank != 0:
            return self.location
        try:
            older = older_than(self._root, step)
        except OSError:  # the folder was removed meanwhile; the state was already read from it
            return self.location
        return f"{self._name} ({older} older {'exists' if older == 1 else 'exist'})"

    # ------------------------------------------------------------------ its checkpoints

    def list(self) -> tuple[SavedStep, ...]:
        return tuple(SavedStep(c.step, c.round) for c in reversed(committed(self._root)))

    def checkpoints(self) -> Checkpoints:
        return open_checkpoints(self._root)

    def delete(self, step: Step, *, even_last: bool) -> bool:
        if self._is_read_only:
            raise ConfigError(
                f"Checkpointer.delete({step}): {self._root} cannot be written by this process (user "
                f"{os.getuid()})"
            )
        return delete_step(self._root, step, even_last=even_last)

    # ------------------------------------------------------------------ save

    def take_for_training(self) -> None:
        """Acquire the folder's training lock on rank 0. All ranks continue, or raise the same error."""
        if self._may_save:
            return
        store = self._store
        key = f"training/{next(self._takes)}"
        error: HoldfastError | None = None
        if self._settings.rank != 0 and store is not None:
            refused = json.loads(store.wait(key))
            error = None if refused is None else ConfigError(refused)
        else:
            try:
                if self._is_read_only:
                    raise ConfigError(
                        f"{self._root} cannot be written by this process (user {os.getuid()}): it can be "
                        "restored from; to save, make it writable or choose another folder"
                    )
                self._training.take()
                self._take_object_store()
            except HoldfastError as failed:
                error = failed
            if store is not None:
                store.publish(key, json.dumps(None if error is None else str(error)))
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame by its traceback
        self._may_save = True

    def _take_object_store(self) -> None:
        """Take the object store for this run. Raises ConfigError where that is refused.

        If the persister ends meanwhile, the next one is asked: a save needs a connection, too.
        """
        if self._object_store is None or self._session is None or not self._has_link():
            return
        for _ in range(_STARTS):
            message = TakeStore(wait_connected(self._session, self, may_close=False))
            try:
                self._session.request(message, Ok)
                return
            except RefusedError as error:
                text = str(error).removeprefix(f"{error.code}: ")
                raise ConfigError(f"Folder(store={str(self._object_store)!r}): {text}") from error
            except UnavailableError as error:
                lost = error
        logger.warning("%s; the next process takes the store before its first upload", lost)

    def keep_for_training(self) -> None:
        if self._is_mounted():
            self._training.keep()

    def wait_for_saves(self, session: Session) -> None:
        session.wait_settled(_SETTLE_SECONDS)

    def is_safe(self, session: Session, handle: SaveHandle, *, waited: bool) -> bool:
        """Return whether `wait_for_saves` was skipped: the persister continues to write in that case."""
        return not waited

    # ------------------------------------------------------------------ inside

    def _has_link(self) -> bool:
        return self._session is not None and self._session.is_open

    def _open_link(self, session: Session) -> RestartRound:
        session.open(Link(self._connect, session, None, self.traits.peer, PERSISTER_PAUSE_SECONDS))
        return wait_connected(session, self)

    def _connect(self) -> socket.socket:
        """Kill the previous persister, if one runs, and start a new one.

        Returns the socket to the new persister. Raises OSError, and ConfigError where another run trains
        in the folder by now.
        """
        self._persister.kill()
        self._give_up_claim()
        self.keep_for_training()
        name = f"rank{self._settings.rank:06d}-{secrets.token_hex(8)}"
        process = Process(self._processes, name)
        if self._is_mounted():
            self._claim = claim(process.trainer)
        directories = self._memory.directories
        return self._persister.start(
            format_options(
                ServiceOptions(
                    self._root,
                    directories.slots,
                    directories.layouts,
                    self._settings.world_size,
                    range(self._settings.rank, self._settings.rank + 1),
                    self._policy,
                    round=self._start.round,
                    restore=self._start.restore,
                    choose_restore=self._start.round is None,
                    rejected=tuple(self._start.excluded),
                    step=self._start.asked,
                    run_id=self._start.run_id,
                    device=self._device,
                    spare_slots_dir=directories.spare_slots,
                    read_only=self._is_read_only,
                    store=None if self._object_store is None else str(self._object_store),
                    store_keep_last=self._store_keep_last,
                    writer=process.writer,
                )
            )
        )

    def _passed_over(self, reply: RestoreReply) -> str | None:
        """Log which newer checkpoints are not restored. Return the error of on_damage="raise"."""
        if not reply.passed_over:
            return None
        lines = "; ".join(reply.passed_over)
        if self._raises_on_damage:
            return (
                f"{self._root} has newer checkpoints than step {reply.restore_point.step}, which cannot be "
                f"restored: {lines}. To go on from step {reply.restore_point.step}, use "
                'on_damage="older", or delete them'
            )
        logger.warning(
            "%s: going back to step %s, because newer checkpoints cannot be restored: %s",
            self._root,
            reply.restore_point.step,
            lines,
        )
        return None

    def _replaced(self, reply: RestoreReply) -> str | None:
        """Return the error if another folder is at this path by now, and the script would begin at step 0."""
        opened = self._opened
        if reply.restore_point.step is not None or opened is None or not opened.is_lost():
            return None
        return (
            f"{self._root} has no checkpoint, and is not the folder that this process opened: that one was "
            "moved away or removed. Put it in the place of the new one and restore again, or create another "
            "Checkpointer to begin without a checkpoint"
        )

    def _hold_restore_point(self) -> None:
        """Keep other processes from deleting the checkpoint that this run was restored from."""
        if self._settings.rank != 0 or not self._is_mounted():
            return
        before, restore = self._restore_point, self._start.restore
        self._restore_point = None if restore is None else claim_checkpoint(self._root, restore)
        if before is not None:
            before.release()

    def _is_mounted(self) -> bool:
        """Return whether a lock file would be created in the folder.

        If its file system was unmounted, the file would be created on the disk below the mount point.
        """
        return device_of(self._root) == self._device

    def _give_up_claim(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _report_other_training(self) -> None:
        """Warn that another run trains in the folder, and that saves will fail."""
        other = self._training.other_holder()
        if other is not None:
            logger.warning(
                "%s is in use: %s trains in it. This process can restore from it, but cannot save "
                "into it before the other process has ended",
                self._root,
                other,
            )


def _is_bad_copy(error: HoldfastError) -> bool:
    return isinstance(error, CorruptionError) or (
        isinstance(error, RefusedError) and error.code in (Refusal.CONFLICT, Refusal.NOT_FOUND)
    )
