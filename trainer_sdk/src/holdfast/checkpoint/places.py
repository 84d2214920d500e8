"""Where a Checkpointer's slots lie and who takes them: the sidecar of a pod, or a process over a folder.

Both are reached by the same messages; this is the only place that knows which one it is.
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
"""In the folder: slots for which there is no room in shared memory."""
_ENDING_SECONDS = 10.0
"""How long a process that was killed may take to end: it gives back much memory."""
_POLL_SECONDS = 0.05


class Place(Protocol):
    """What a Checkpointer needs to know of where it is."""

    slots_dir: Path
    spare_slots_dir: Path | None
    """Where slots lie for which `slots_dir` has no room; None: nowhere."""
    advice: SlotAdvice
    layouts_dir: Path
    slots: int
    job_uid: JobUid
    hello_seconds: float | None
    """How long to wait for the answer to a greeting; None: as long as the other side lives."""

    @property
    def peer(self) -> str:
        """Names the other side in messages."""
        ...

    @property
    def where_to_look(self) -> str:
        """What to look at when saves do not become durable."""
        ...

    def open(self) -> None:
        """Before the first connection. The directories are right from then on."""
        ...

    def connect(self) -> socket.socket:
        """A new connection; raises OSError."""
        ...

    def close(self, *, wait: bool) -> None:
        """After the connection ended. `wait`: until what was staged is durable."""
        ...


@dataclass(slots=True)
class PodPlace:
    """A worker pod: the sidecar's socket in the shared volume."""

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
        """The sidecar was there before."""

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
        """The sidecar outlives the ranks: nothing to wait for."""


@dataclass(slots=True)
class DirectoryPlace:
    """A folder: each rank starts a persister, which lives as long as the connection."""

    root: Path
    settings: RankSettings
    policy: Policy
    slots_dir: Path
    layouts_dir: Path
    slots: int
    removes_slots: bool
    """No launcher removes them: they go with this Checkpointer."""
    spare_slots_dir: Path | None = None
    job_uid: JobUid = JOB_UID
    round: RestartRound | None = None
    restore: CheckpointId | None = None
    rejected: list[CheckpointId] = field(default_factory=list)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """The same for all ranks: rank 0's."""
    is_read_only: bool = False
    device: int | None = None
    """Of the file system on which the folder was when it was opened."""
    hello_seconds: float | None = None
    advice: SlotAdvice = IN_A_FOLDER
    exit_status: int | None = None
    """Of the last persister that ended while it was wanted."""
    _process: subprocess.Popen[bytes] | None = None
    _claim: Claim | None = None
    _memory: Claim | None = None
    _training: Claim | None = None
    _keeping: threading.Lock = field(default_factory=threading.Lock)
    """`connect` is called by the link's thread."""
    _seen: frozenset[CheckpointId] = frozenset()

    @classmethod
    def of(
        cls,
        root: Path,
        settings: RankSettings,
        policy: Policy,
        slots_dir: Path | None = None,
    ) -> DirectoryPlace:
        """`slots_dir`: where slots lie, instead of shared memory. Raises ConfigError when a folder cannot
        be used."""
        try:
            make_directories(root)
        except OSError as error:
            if not root.is_dir():  # of one that is there, durable names are its owner's concern
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
            # The same folder finds the same slots again, touched, after a crash.
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
        """The process of another run that trains in the folder."""
        return None if self._training is not None else holder(self._training_lock)

    def take_for_training(self) -> None:
        """Keep other runs from saving here until `close`, or until this process ends. Waits for a moment
        for a process that is ending. Raises ConfigError, also where another run has saved since `look`: this
        one goes on from an older step, and its later round would hide what the other one did."""
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
        """Take the lock of `take_for_training` again where it was removed, alone or with the folder. Does not
        wait. Raises ConfigError where another run has taken the folder since, or has saved in it."""
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
        """Remember which checkpoints are there, before it is chosen what this run starts from: one that is
        committed in between must not count as seen."""
        self._seen = self._checkpoints()

    def _is_of_later_run(self, checkpoint: CheckpointId) -> bool:
        """What the writer of this run found complete at its start and committed is what the run starts from,
        or older."""
        if checkpoint.round == self.round:
            return False
        start = self.restore
        return start is None or (checkpoint.round, checkpoint.step) > (start.round, start.step)

    def _checkpoints(self) -> frozenset[CheckpointId]:
        try:
            return frozenset(checkpoint for _, checkpoint in manifests_in(self.root / "tier"))
        except (HoldfastError, OSError):
            return frozenset()  # the folder is gone: there is nothing to hide

    @property
    def processes_dir(self) -> Path:
        return self.root / "processes"

    def open(self) -> None:
        """Rank 0 waits for what an ended run still writes, the others for rank 0. Then this rank takes
        memory: where an earlier life of it left some, unless that lives, or somebody who looks at the
        same folder. Two that shared slots would read each other's steps."""
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
            self.removes_slots = True  # nobody else would find them
        except OSError as error:
            logger.info("%s: %s; others do not see that it is in use", shared, error)

    def holds_memory(self) -> bool:
        """Whether the slots' directory is this rank's, also after its lock was removed with the slots."""
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
        """End a persister from before, which has been given up, and start another one. Raises OSError, and
        ConfigError where another run trains in the folder by now."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self.exit_status = self._process.wait()
            self._process = None
        self._give_up_claim()
        self.keep_for_training()
        name = f"rank{self.settings.rank:06d}-{secrets.token_hex(8)}"
        process = Process(self.processes_dir, name)
        if (
            device_of(self.root) == self.device
        ):  # else it would be made below an unmounted file system
            self._claim = claim(process.trainer)
        plain, theirs = socket.socketpair()
        ours = OwnSocket.of(plain)
        with theirs:
            words = format_options(
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
                        words,
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # A launcher ends a rank's group, and a terminal interrupts it: what was given to
                    # the persister is still to be written.
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
        """Whether no persister is left."""
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
        """Of this rank, and the directory behind the last one."""
        with contextlib.suppress(OSError):
            for path in directory.glob(f"rank{self.settings.rank:06d}.*.slot"):
                path.unlink(missing_ok=True)
            (directory / ".allocate").unlink(missing_ok=True)
            directory.rmdir()


def _sweep(shared: Path, spare: Path) -> None:
    """Remove the memory of those that had their own and were killed."""
    for left in shared.parent.glob(f"{shared.name}+*"):
        with contextlib.suppress(OSError):
            held = Claim(left / _OWN_LOCK, wait=False)
            shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(spare / left.name, ignore_errors=True)
            held.forget()
