"""The location of a Checkpointer's slots and the process that reads them.

In a pod that process is the sidecar. For a folder it is a persister, which each rank starts. Both serve
the same messages. This module contains all other differences between the two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from holdfast.base.settings import RankSettings
from holdfast.connection.own_socket import OwnSocket
from holdfast.directory.choice import JOB_UID
from holdfast.directory.claims import Claim, claim, holder
from holdfast.directory.options import format_options
from holdfast.directory.presence import device_of
from holdfast.directory.processes import Process, wait_for_writers
from holdfast.slots.capacity import IN_A_FOLDER, IN_A_POD, SlotAdvice
from holdfast_core.contract import LAYOUTS_DIR, SLOTS_DIR, SOCKET_NAME, PodContract
from holdfast_core.errors import ConfigError, HoldfastError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound
from holdfast_core.messages.schema import Policy
from holdfast_core.node.files import make_directories
from holdfast_core.node.tier import manifests_in

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_LEAVE_SECONDS = 120.0
_OWN_LOCK = "in-use.lock"
_MEMORY = "memory"
"""Subdirectory of the folder for slots that do not fit into shared memory."""
_ENDING_SECONDS = 10.0
"""Time that a killed process may take to end. It takes long where much memory must be freed."""
_POLL_SECONDS = 0.05


class Place(Protocol):
    """Interface of a Checkpointer to the location of its slots and to the process that reads them."""

    slots_dir: Path
    spare_slots_dir: Path | None
    """Directory for slots that do not fit into `slots_dir`. None: there is no such directory."""
    advice: SlotAdvice
    layouts_dir: Path
    slots: int
    job_uid: JobUid
    hello_seconds: float | None
    """Time to wait for the reply to Hello. None: wait until the other side ends."""

    @property
    def peer(self) -> str:
        """Name of the other side for log and error messages."""
        ...

    @property
    def where_to_look(self) -> str:
        """Advice for log messages: what to check when saves do not become durable."""
        ...

    def open(self) -> None:
        """Prepare the place before the first connection. This may change the directories above."""
        ...

    def connect(self) -> socket.socket:
        """Open a new connection. Raises OSError."""
        ...

    def close(self, *, wait: bool) -> None:
        """Release the place after the connection has ended.

        With `wait`, this waits a bounded time until all staged saves are durable.
        """
        ...


@dataclass(slots=True)
class PodPlace:
    """Place of a worker pod: the sidecar, reached by its socket in the shared volume."""

    socket_path: Path
    slots_dir: Path
    layouts_dir: Path
    slots: int
    job_uid: JobUid
    hello_seconds: float | None = 10.0
    spare_slots_dir: Path | None = None
    advice: SlotAdvice = IN_A_POD

    def __str__(self) -> str:
        return f"the sidecar at {self.socket_path}"

    @property
    def peer(self) -> str:
        return "the sidecar"

    @property
    def where_to_look(self) -> str:
        return "look at the log of the sidecar container and at the conditions of the TrainingJob"

    def open(self) -> None:
        """Do nothing: Kubernetes has already started the sidecar."""

    @classmethod
    def of(cls, contract: PodContract) -> PodPlace:
        shared = Path(contract.shared_dir)
        return cls(
            shared / SOCKET_NAME,
            shared / SLOTS_DIR,
            shared / LAYOUTS_DIR,
            contract.slots,
            contract.job_uid,
        )

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self.socket_path))
        except OSError:
            connection.close()
            raise
        return OwnSocket.of(connection)

    def close(self, *, wait: bool) -> None:
        """Do nothing: the sidecar outlives the ranks and finishes their saves."""


@dataclass(slots=True)
class DirectoryPlace:
    """Place of a folder. Each rank starts a persister, which ends after the connection has ended."""

    root: Path
    settings: RankSettings
    policy: Policy
    slots_dir: Path
    layouts_dir: Path
    slots: int
    removes_slots: bool
    """Whether `close` removes the slots, because no launcher does."""
    spare_slots_dir: Path | None = None
    job_uid: JobUid = JOB_UID
    round: RestartRound | None = None
    restore: CheckpointId | None = None
    rejected: list[CheckpointId] = field(default_factory=list)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Identity of the run. Rank 0 creates it, and all ranks use the same."""
    is_read_only: bool = False
    device: int | None = None
    """Device number of the folder's file system when the folder was opened."""
    hello_seconds: float | None = None
    advice: SlotAdvice = IN_A_FOLDER
    exit_status: int | None = None
    """Exit status of the last persister that `connect` had to replace."""
    _process: subprocess.Popen[bytes] | None = None
    _claim: Claim | None = None
    _memory: Claim | None = None
    _training: Claim | None = None
    _keeping: threading.Lock = field(default_factory=threading.Lock)
    """Serializes `keep_for_training`: `connect` calls it in the link's thread."""
    _seen: frozenset[CheckpointId] = frozenset()
    """Checkpoints that the folder held at the last `look`."""

    @classmethod
    def of(
        cls,
        root: Path,
        settings: RankSettings,
        policy: Policy,
        slots_dir: Path | None = None,
    ) -> DirectoryPlace:
        """Make the place for the folder `root`, which is created if it does not exist.

        Args:
            root: Absolute path of the folder.
            settings: Environment of this rank.
            policy: Policy that the persister follows.
            slots_dir: Directory for the slots, instead of shared memory.

        Raises:
            ConfigError: `root` cannot be created, or `slots_dir` cannot be written.
        """
        try:
            make_directories(root)
        except OSError as error:
            # If the folder exists, only the fsync of its parent failed, which is harmless.
            if not root.is_dir():
                raise ConfigError(f"Checkpointer(dir={str(root)!r}): {error}") from error
        key = blake3(str(root).encode()).hexdigest()[:16]
        if slots_dir is not None:
            if not os.access(slots_dir, os.W_OK):
                raise ConfigError(
                    f"Checkpointer(slots_dir={str(slots_dir)!r}): expected a directory that this process "
                    "can write"
                )
            memory = slots_dir / f"holdfast-{os.getuid()}-{key}"
        elif settings.scratch_dir is not None:
            memory = Path(settings.scratch_dir) / key
        elif os.access(SHARED_MEMORY, os.W_OK):
            # The name depends on the folder alone, so that a run after a crash reuses the same slots,
            # whose memory is already touched.
            memory = SHARED_MEMORY / f"holdfast-{os.getuid()}-{key}"
        else:
            memory = root / _MEMORY
        read_only = not all(os.access(p, os.W_OK) for p in (root, root / "tier") if p.exists())
        has_spare = slots_dir is None and not read_only and memory.parent != root
        return cls(
            root,
            settings,
            policy,
            memory / SLOTS_DIR,
            memory / LAYOUTS_DIR,
            policy.slots,
            removes_slots=settings.scratch_dir is None or slots_dir is not None,
            spare_slots_dir=root / _MEMORY / memory.name / SLOTS_DIR if has_spare else None,
            is_read_only=read_only,
        )

    def __str__(self) -> str:
        return self.peer

    @property
    def peer(self) -> str:
        return f"the process that writes to {self.root}"

    @property
    def where_to_look(self) -> str:
        number = "" if self._process is None else f" (process {self._process.pid})"
        return (
            f"look whether {self.root} is mounted, writable and has room, and what the process that "
            f"writes to it{number} wrote to standard error"
        )

    @property
    def _training_lock(self) -> Path:
        return self.root / "training.lock"

    def trained_by(self) -> str | None:
        """Return a description of the other run's process that trains in the folder, or None."""
        return None if self._training is not None else holder(self._training_lock)

    def take_for_training(self) -> None:
        """Acquire the lock that keeps other runs from saving here until `close` or the end of this process.

        It waits up to 10 seconds for a process that is ending. Where the file system has no locks, this
        logs it and continues without one.

        Raises ConfigError where the folder is read-only, where another run holds the lock, and where
        another run has saved since `look`. In the last case this run continues from an older step, and
        its later round would hide the other run's checkpoints.
        """
        if self.is_read_only:
            raise ConfigError(
                f"{self.root} cannot be written by this process (user {os.getuid()}): it can be restored "
                "from; to save, make it writable or choose another folder"
            )
        deadline = time.monotonic() + _ENDING_SECONDS
        while self._training is None:
            try:
                self._training = Claim(self._training_lock, wait=False)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                raise self._in_use() from None
            except OSError as error:
                logger.info("%s: %s; other runs do not see this one", self._training_lock, error)
                return
        try:
            self._expect_nothing_newer()
        except ConfigError:
            self._training.release()
            self._training = None
            raise

    def keep_for_training(self) -> None:
        """Acquire the lock of `take_for_training` again if its file was removed, alone or with the folder.

        This does not wait. Raises ConfigError where another run has acquired the lock since, or has saved.
        """
        with self._keeping:
            held = self._training
            if held is None or held.is_in_place() or device_of(self.root) != self.device:
                return
            try:
                again = Claim(self._training_lock, wait=False)
            except BlockingIOError:
                raise self._in_use() from None
            except OSError as error:
                logger.info("%s: %s; other runs do not see this one", self._training_lock, error)
                return
            try:
                self._expect_nothing_newer()
            except ConfigError:
                again.release()
                raise
            held.forget()
            self._training = again

    def _in_use(self) -> ConfigError:
        whose = holder(self._training_lock) or "another process"
        return ConfigError(
            f"{self.root} is in use: {whose} trains in it, and one run at a time may save in a "
            "folder. Wait for its end, end it, or choose another folder"
        )

    def _expect_nothing_newer(self) -> None:
        newer = [c for c in self._checkpoints() - self._seen if self._is_of_later_run(c)]
        if newer:
            raise ConfigError(
                f"{self.root}: another run has saved step {max(c.step for c in newer)} since this one opened "
                "the folder. Start again, to go on from there, or choose another folder"
            )

    def look(self) -> None:
        """Record which checkpoints exist.

        Call it before the restore point is chosen: a checkpoint that is committed in between must not
        count as seen.
        """
        self._seen = self._checkpoints()

    def _is_of_later_run(self, checkpoint: CheckpointId) -> bool:
        """Return whether another run saved this checkpoint after this run chose its restore point.

        This run's own persister may commit what an ended run left complete. Such a checkpoint is the
        restore point, or older than it.
        """
        if checkpoint.round == self.round:
            return False
        start = self.restore
        return start is None or (checkpoint.round, checkpoint.step) > (start.round, start.step)

    def _checkpoints(self) -> frozenset[CheckpointId]:
        try:
            return frozenset(checkpoint for _, checkpoint in manifests_in(self.root / "tier"))
        except (HoldfastError, OSError):
            return frozenset()  # the folder was removed, so that it holds no newer checkpoint

    @property
    def processes_dir(self) -> Path:
        return self.root / "processes"

    def open(self) -> None:
        """Wait for the writers of an ended run (rank 0 only), and acquire a directory for slots.

        The directory is the one that an earlier process of this rank used, so that its memory is reused.
        If another live process holds it (that earlier process, or another run that opened the same
        folder), this rank uses a new directory. Two processes that shared slots would read each other's
        steps.
        """
        shared = self.slots_dir.parent
        self.device = device_of(self.root)
        if self.settings.rank == 0:
            wait_for_writers(self.processes_dir)
            _sweep(shared, self.root / _MEMORY)
        try:
            self._memory = Claim(shared / f"rank{self.settings.rank:06d}.lock", wait=False)
        except BlockingIOError:
            own = shared.with_name(f"{shared.name}+{secrets.token_hex(8)}")
            self._memory = claim(own / _OWN_LOCK)
            self.slots_dir, self.layouts_dir = own / SLOTS_DIR, own / LAYOUTS_DIR
            if self.spare_slots_dir is not None:
                self.spare_slots_dir = self.root / _MEMORY / own.name / SLOTS_DIR
            self.removes_slots = True  # no later run looks for a directory with a random name
        except OSError as error:
            logger.info("%s: %s; others do not see that it is in use", shared, error)

    def holds_memory(self) -> bool:
        """Return whether this process still holds the directory of its slots.

        If the lock file was removed with the slots, this acquires the lock again.
        """
        if self._memory is None or self._memory.is_in_place():
            return True
        path = self.slots_dir.parent / self._memory.name
        try:
            again = Claim(path, wait=False)
        except OSError:
            return False
        self._memory.forget()
        self._memory = again
        return True

    def connect(self) -> socket.socket:
        """Kill the previous persister, if one runs, and start a new one.

        Returns the socket to the new persister. Raises OSError, and ConfigError where another run trains
        in the folder by now.
        """
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self.exit_status = self._process.wait()
            self._process = None
        self._give_up_claim()
        self.keep_for_training()
        name = f"rank{self.settings.rank:06d}-{secrets.token_hex(8)}"
        process = Process(self.processes_dir, name)
        # On another device the claim would be created on the disk below an unmounted file system.
        if device_of(self.root) == self.device:
            self._claim = claim(process.trainer)
        plain, theirs = socket.socketpair()
        ours = OwnSocket.of(plain)
        with theirs:
            text = format_options(
                root=self.root,
                slots_dir=self.slots_dir,
                layouts_dir=self.layouts_dir,
                rank=self.settings.rank,
                world_size=self.settings.world_size,
                policy=self.policy,
                round_=self.round,
                restore=self.restore,
                rejected=self.rejected,
                run_id=self.run_id,
                device=self.device,
                spare_slots_dir=self.spare_slots_dir,
                read_only=self.is_read_only,
                writer=process.writer,
            )
            try:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "holdfast.directory.persister",
                        str(theirs.fileno()),
                        text,
                    ],
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

    def close(self, *, wait: bool) -> None:
        ended = self._reap(_LEAVE_SECONDS if wait else 5.0)
        if not ended:
            logger.warning(
                "%s: what was saved is still being written: the next run waits for it", self.root
            )
        self._give_up_claim()
        if ended and self.removes_slots and self.holds_memory():
            self._remove_slots(self.slots_dir)
            with contextlib.suppress(OSError):
                if not self.slots_dir.exists():
                    shutil.rmtree(self.layouts_dir, ignore_errors=True)
        if ended and self.spare_slots_dir is not None:
            self._remove_slots(self.spare_slots_dir)
            with contextlib.suppress(OSError):
                self.spare_slots_dir.parent.rmdir()
                (self.root / _MEMORY).rmdir()
        if self._memory is not None:
            self._memory.release()
            self._memory = None
        if self._training is not None:
            self._training.release()
            self._training = None

    def _reap(self, seconds: float) -> bool:
        """Wait up to `seconds` for the persister to end. Return whether none is left."""
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self._process = None
        return True

    def _give_up_claim(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _remove_slots(self, directory: Path) -> None:
        """Remove this rank's slots from `directory`, and the directory if it is empty then."""
        with contextlib.suppress(OSError):
            for path in directory.glob(f"rank{self.settings.rank:06d}.*.slot"):
                path.unlink(missing_ok=True)
            (directory / ".allocate").unlink(missing_ok=True)
            directory.rmdir()


def _sweep(shared: Path, spare: Path) -> None:
    """Remove the directories that `open` made under random names for processes that were killed."""
    for left in shared.parent.glob(f"{shared.name}+*"):
        with contextlib.suppress(OSError):
            held = Claim(left / _OWN_LOCK, wait=False)
            shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(spare / left.name, ignore_errors=True)
            held.forget()
