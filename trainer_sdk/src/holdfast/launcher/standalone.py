"""Runs the rounds of a gang on one machine without a sidecar, and restarts all ranks in place.

It behaves like torchrun. Every round has its own store process, and the ranks are forked from the same fork
server. `Checkpointer(dir=...)` decides from which step a round starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from holdfast.directory.processes import Claim, claim
from holdfast.launcher.processes import STORE_SECRET_BYTES, Processes, RankProcess, RoundSettings
from holdfast_core.ids import RestartRound

logger = logging.getLogger(__name__)

_PREFIX = "holdfast-run-"
_LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")


_LOOPBACK = "127.0.0.1"


class ScratchDirectory:
    """A directory in shared memory for the slots of a standalone run, which `close` removes.

    It outlives the ranks, so that a restart in place finds its slots touched and filled. The next launcher
    removes the directory of a killed launcher, because its lock is free.
    """

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        self._parent = parent
        self._lock: Claim | None = None
        self.path: Path | None = None

    def open(self) -> Path | None:
        """Create the directory. Return None where the machine has no usable shared memory.

        The slots are then in the folder of the checkpoints.
        """
        if not os.access(self._parent, os.W_OK):
            return None
        sweep(self._parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        self._lock = claim(self.path / _LOCK)
        return self.path

    def close(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
        if self._lock is not None:
            self._lock.forget()
            self._lock = None


def sweep(parent: Path) -> None:
    """Remove this user's directories whose launcher has ended."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if lock.stat(follow_symlinks=False).st_uid == os.getuid():
                held = Claim(lock, wait=False)
                shutil.rmtree(lock.parent, ignore_errors=True)
                held.forget()


class StandaloneLauncher:
    """Runs rounds until all ranks return 0 or no restarts are left."""

    def __init__(self, processes: Processes, settings: RoundSettings) -> None:
        self._processes = processes
        self._settings = settings
        self._is_stopping = False

    def stop(self) -> None:
        """Do not restart the ranks any more."""
        self._is_stopping = True

    async def run(self) -> int:
        """Run the rounds. Return 0, or the exit code of the rank that failed first in the last round."""
        round_ = RestartRound(0)
        while True:
            failed = await self._run_round(round_)
            if failed is None:
                return 0
            if self._is_stopping:
                return _exit_code(failed)
            left = self._settings.max_restarts - round_
            logger.error(
                "rank %d ended with code %s in round %d; %s",
                failed.rank,
                failed.code,
                round_,
                f"restarting all ranks in place ({left} restarts left)"
                if left > 0
                else "no restarts are left (--max-restarts)",
            )
            if left <= 0:
                return _exit_code(failed)
            round_ = RestartRound(round_ + 1)

    async def _run_round(self, round_: RestartRound) -> RankProcess | None:
        """Run one round and end all its processes. Return the rank that failed first, or None."""
        store, port = await self._processes.fork_store(_LOOPBACK)
        first = replace(
            self._settings.first,
            round=round_,
            master_address=_LOOPBACK,
            master_port=port,
            store_secret=secrets.token_hex(STORE_SECRET_BYTES),
        )
        try:
            await self._processes.fork_ranks(replace(self._settings, first=first))
            async with aclosing(self._processes.ends()) as ends:
                async for ended in ends:
                    if ended.code != 0:
                        return ended
            return None
        finally:
            await self._processes.end_ranks()
            self._processes.end_store(store)


def _exit_code(failed: RankProcess) -> int:
    """Return the exit code of the run: 128 + N for signal N, as in a shell."""
    code = 1 if failed.code is None else failed.code
    return 128 - code if code < 0 else code
