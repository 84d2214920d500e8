"""Where a Checkpointer's slots lie and who takes them: the sidecar of a pod, or a process over a folder.

Both are reached by the same messages; this is the only place that knows which one it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from holdfast.directory.choice import JOB_UID
from holdfast.directory.options import format_options
from holdfast.directory.processes import Claim, Process, claim
from holdfast.settings import RankSettings
from holdfast_core.contract import LAYOUTS_DIR, SLOTS_DIR, SOCKET_NAME, PodContract
from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound
from holdfast_core.tiers.disk import make_directories
from holdfast_core.transfer.messages import Policy

SHARED_MEMORY = Path("/dev/shm")
_LEAVE_SECONDS = 120.0


class Place(Protocol):
    """What a Checkpointer needs to know of where it is."""

    slots_dir: Path
    layouts_dir: Path
    slots: int
    job_uid: JobUid

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
        return connection

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
    job_uid: JobUid = JOB_UID
    round: RestartRound | None = None
    restore: CheckpointId | None = None
    rejected: list[CheckpointId] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _claim: Claim | None = None

    @classmethod
    def of(cls, root: Path, settings: RankSettings, policy: Policy) -> DirectoryPlace:
        """Raises ConfigError when the folder cannot be used."""
        root = root.absolute()
        try:
            make_directories(root)
        except OSError as error:
            raise ConfigError(f"Checkpointer(dir={str(root)!r}): {error}") from error
        if settings.scratch_dir is not None:
            memory = Path(settings.scratch_dir)
        elif os.access(SHARED_MEMORY, os.W_OK):
            # The same folder finds the same slots again, touched, after a crash.
            name = blake3(str(root).encode()).hexdigest()[:16]
            memory = SHARED_MEMORY / f"holdfast-{os.getuid()}-{name}"
        else:
            memory = root / "memory"
        key = blake3(str(root).encode()).hexdigest()[:16]
        memory = memory / key if settings.scratch_dir is not None else memory
        return cls(
            root,
            settings,
            policy,
            memory / SLOTS_DIR,
            memory / LAYOUTS_DIR,
            policy.slots,
            removes_slots=settings.scratch_dir is None,
        )

    @property
    def processes_dir(self) -> Path:
        return self.root / "processes"

    def connect(self) -> socket.socket:
        self._reap(0.0)
        name = f"rank{self.settings.rank:06d}-{secrets.token_hex(8)}"
        process = Process(self.processes_dir, name)
        self._claim = claim(process.trainer)
        ours, theirs = socket.socketpair()
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
                writer=process.writer,
            )
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "holdfast.persister", str(theirs.fileno()), words],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        return ours

    def close(self, *, wait: bool) -> None:
        self._reap(_LEAVE_SECONDS if wait else 5.0)
        if self.removes_slots:
            for path in self.slots_dir.glob(f"rank{self.settings.rank:06d}.*.slot"):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.slots_dir / ".allocate").unlink(missing_ok=True)
                self.slots_dir.rmdir()
                shutil.rmtree(self.slots_dir.parent, ignore_errors=True)

    def _reap(self, seconds: float) -> None:
        process, claimed = self._process, self._claim
        self._process = self._claim = None
        if process is not None:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if claimed is not None:
            claimed.release()
