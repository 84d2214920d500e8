"""Lets only one run train in a folder. Other runs may restore from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.directory.processes import Claim, holder
from holdfast_core.errors import ConfigError

logger = logging.getLogger(__name__)

_ENDING_SECONDS = 10.0
"""Time that a killed process may take to end. It takes long where much memory must be freed."""
_POLL_SECONDS = 0.05


class TrainingLock:
    """DIR/training.lock, which rank 0 holds from its first save until its process ends at the latest.

    Where the file system has no locks, it is logged, and the run continues without one.

    Args:
        root: The folder.
        expect_nothing_newer: Raises ConfigError if another run has saved since this run chose its restore
            point. This run would continue from an older step, and its later round would hide the
            checkpoints of the other run.
    """

    def __init__(self, root: Path, expect_nothing_newer: Callable[[], None]) -> None:
        self._root = root
        self._path = root / "training.lock"
        self._expect_nothing_newer = expect_nothing_newer
        self._held: Claim | None = None
        self._keeping = threading.Lock()
        """Serializes `keep`: the training thread and the link's thread call it."""

    def other_holder(self) -> str | None:
        """Return a description of the other run's process that holds the lock, or None."""
        return None if self._held is not None else holder(self._path)

    def take(self) -> None:
        """Acquire the lock. This waits up to 10 seconds for a process that is ending.

        Raises ConfigError where another run holds the lock, or has saved.
        """
        deadline = time.monotonic() + _ENDING_SECONDS
        while self._held is None:
            try:
                if not self._acquire():
                    return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise self._in_use() from None
                time.sleep(_POLL_SECONDS)

    def keep(self) -> None:
        """Acquire the lock again if its file was removed, alone or with the folder. This does not wait.

        Raises ConfigError where another run has acquired the lock since, or has saved.
        """
        with self._keeping:
            if self._held is None or self._held.is_in_place():
                return
            try:
                self._acquire()
            except BlockingIOError:
                raise self._in_use() from None

    def release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _acquire(self) -> bool:
        """Acquire the lock instead of the one that is held. Return False where there are no locks.

        Raises BlockingIOError, ConfigError.
        """
        try:
            lock = Claim(self._path, wait=False)
        except BlockingIOError:
            raise
        except OSError as error:
            logger.info(
                "%s: %s. Other runs cannot detect that this run uses the folder", self._path, error
            )
            return False
        try:
            self._expect_nothing_newer()
        except ConfigError:
            lock.release()
            raise
        if self._held is not None:
            self._held.forget()
        self._held = lock
        return True

    def _in_use(self) -> ConfigError:
        whose = holder(self._path) or "another process"
        return ConfigError(
            f"{self._root} is in use: {whose} trains in it, and one run at a time may save in a "
            "folder. Wait for its end, end it, or choose another folder"
        )
