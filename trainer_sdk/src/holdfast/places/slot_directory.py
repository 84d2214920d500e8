"""The directory of one rank's slots, for checkpoints in a folder.

Its name depends on the folder alone, so that a run after a crash reuses the same slots, whose memory is
already touched. Two live processes that shared slots would read each other's steps, so that each holds a
lock on its directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from pathlib import Path

from blake3 import blake3

from holdfast.base.settings import RankSettings
from holdfast.directory.processes import Claim, claim
from holdfast.places.place import Directories
from holdfast_core.contract import LAYOUTS_DIR, SLOTS_DIR
from holdfast_core.errors import ConfigError
from holdfast_core.ids import Rank

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_MEMORY = "memory"
"""Subdirectory of the folder for slots that do not fit into shared memory."""
_OWN_LOCK = "in-use.lock"


class SlotDirectory:
    """The directory that this rank's slots and layouts are in, and its lock.

    Args:
        path: The directory. `open` may replace it by one with a random name.
        rank: This rank.
        spare: Directory in the folder for slots that do not fit into `path`, or None.
        is_removed: Whether `close` removes the slots, because no launcher does.
    """

    def __init__(self, path: Path, rank: Rank, spare: Path | None, *, is_removed: bool) -> None:
        self._path = path
        self._rank = rank
        self._spare = spare
        self._is_removed = is_removed
        self._lock: Claim | None = None

    @classmethod
    def of_folder(
        cls,
        root: Path,
        settings: RankSettings,
        slots_dir: str | os.PathLike[str] | None,
        *,
        is_read_only: bool,
    ) -> SlotDirectory:
        """Choose the directory for the folder `root`.

        Args:
            root: Absolute path of the folder.
            settings: Environment of this rank.
            slots_dir: Directory that the script chose, instead of shared memory.
            is_read_only: Whether the folder cannot be written.

        Raises:
            ConfigError: `slots_dir` cannot be written.
        """
        key = blake3(str(root).encode()).hexdigest()[:16]
        if slots_dir is not None:
            chosen = Path(slots_dir).absolute()
            if not os.access(chosen, os.W_OK):
                raise ConfigError(
                    f"Folder(slots_dir={str(chosen)!r}): expected a directory that this process "
                    "can write"
                )
            path = chosen / f"holdfast-{os.getuid()}-{key}"
        elif settings.scratch_dir is not None:
            path = Path(settings.scratch_dir) / key
        elif os.access(SHARED_MEMORY, os.W_OK):
            path = SHARED_MEMORY / f"holdfast-{os.getuid()}-{key}"
        else:
            path = root / _MEMORY
        has_spare = slots_dir is None and not is_read_only and path.parent != root
        return cls(
            path,
            settings.rank,
            root / _MEMORY if has_spare else None,
            is_removed=settings.scratch_dir is None or slots_dir is not None,
        )

    @property
    def directories(self) -> Directories:
        spare = None if self._spare is None else self._spare / self._path.name / SLOTS_DIR
        return Directories(self._path / SLOTS_DIR, self._path / LAYOUTS_DIR, spare)

    def open(self) -> None:
        """Acquire the directory that an earlier process of this rank used, so that its memory is reused.

        If another live process holds it (that earlier process, or another run that opened the same
        folder), this rank uses a new directory.
        """
        if self._rank == 0:
            self._sweep()
        try:
            self._lock = Claim(self._path / f"rank{self._rank:06d}.lock", wait=False)
        except BlockingIOError:
            self._path = self._path.with_name(f"{self._path.name}+{secrets.token_hex(8)}")
            self._lock = claim(self._path / _OWN_LOCK)
            self._is_removed = True  # no later run looks for a directory with a random name
        except OSError as error:
            logger.info(
                "%s: %s. Other processes cannot detect that the folder is in use", self._path, error
            )

    def is_held(self) -> bool:
        """Return whether this process still holds the directory of its slots.

        If the lock file was removed with the slots, this acquires the lock again.
        """
        if self._lock is None or self._lock.is_in_place():
            return True
        try:
            again = Claim(self._path / self._lock.name, wait=False)
        except OSError:
            return False
        self._lock.forget()
        self._lock = again
        return True

    def close(self, *, has_readers: bool) -> None:
        """Release the directory, and remove the slots if no launcher does and no process reads them."""
        now = self.directories
        if not has_readers and self._is_removed and self.is_held():
            self._remove_slots(now.slots)
            with contextlib.suppress(OSError):
                if not now.slots.exists():
                    shutil.rmtree(now.layouts, ignore_errors=True)
        if not has_readers and self._spare is not None and now.spare_slots is not None:
            self._remove_slots(now.spare_slots)
            with contextlib.suppress(OSError):
                now.spare_slots.parent.rmdir()
                self._spare.rmdir()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _remove_slots(self, directory: Path) -> None:
        """Remove this rank's slots from `directory`, and the directory if it is empty then."""
        with contextlib.suppress(OSError):
            for path in directory.glob(f"rank{self._rank:06d}.*.slot"):
                path.unlink(missing_ok=True)
            (directory / ".allocate").unlink(missing_ok=True)
            directory.rmdir()

    def _sweep(self) -> None:
        """Remove the directories that `open` made under random names for processes that were killed."""
        for left in self._path.parent.glob(f"{self._path.name}+*"):
            with contextlib.suppress(OSError):
                held = Claim(left / _OWN_LOCK, wait=False)
                shutil.rmtree(left, ignore_errors=True)
                if self._spare is not None:
                    shutil.rmtree(self._spare / left.name, ignore_errors=True)
                held.forget()
