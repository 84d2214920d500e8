"""The volume of the node tier: its directories, its room, its spare files and its quarantined ones."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from holdfast_core.errors import CapacityError, CorruptionError, UnreadableError
from holdfast_core.node.files import DurableDirectories, TempFile, disk_errors, fsync_directory
from holdfast_core.node.index import Budget
from holdfast_core.node.spares import SPARE, SpareFiles

QUARANTINE = "quarantine"
QUARANTINE_KEPT = 8
"""Maximum number of quarantined files, which are kept for inspection. The oldest are removed first."""


_QUARANTINED = re.compile(r"\d{10}-(?!.*\.reason$).+", re.ASCII | re.DOTALL)


class Volume:
    """The volume of a node tier. Thread-safe, and safe beside other processes with the same root."""

    def __init__(self, root: Path, capacity_bytes: int, fill_limit: float, advice: str) -> None:
        """See DiskNodeTier for the arguments."""
        self.root = root
        self.directories = DurableDirectories(root)
        self.budget = Budget(root, capacity_bytes, fill_limit, advice)
        self.spares = SpareFiles(root / SPARE, self.directories, self.budget)
        self._lock = threading.Lock()

    def create(self, names: Iterable[str]) -> None:
        """Create the root, and directories of these names in it. Raises OSError."""
        for path in (self.root, *(self.root / name for name in names)):
            self.directories.ensure(path)

    @contextmanager
    def reserve(self, size: int, what: str, blocks: int | None = None) -> Iterator[None]:
        """Reserve room within the context, as `Budget.take` does. Raises CapacityError.

        If the room does not suffice, the files that nothing needs are removed first (`make_room`).
        """
        with disk_errors(f"reserving {size} bytes of {self.root} for {what}"):
            while True:
                try:
                    self.budget.take(size, what, blocks)
                    break
                except CapacityError:
                    if not self.make_room():
                        raise
        try:
            yield
        finally:
            self.budget.give_back(size, blocks)

    def make_room(self) -> bool:
        """Remove the spare files, or else the quarantined ones, which are kept for inspection only.

        Return False if there were none of either.
        """
        with disk_errors(f"making room in {self.root}"):
            return self.spares.remove_all() or self._empty_quarantine()

    def take_spare(self, directory: Path, size: int, stack: ExitStack) -> TempFile | None:
        """Return a spare file to overwrite, which `stack` discards unless it is published, or None."""
        spare = self.spares.take(directory, size)
        if spare is not None:
            stack.callback(spare.discard)
        return spare

    def remove_spare_files(self) -> bool:
        """Remove the spare files. Return False if there were none."""
        with disk_errors(f"removing the spare files of {self.root}"):
            return self.spares.remove_all()

    def quarantine(self, path: Path, reason: str) -> None:
        """Move a file of this volume to quarantine. An absent file is not an error."""
        directory = self.root / QUARANTINE
        name = _quarantined_name(path.relative_to(self.root))
        with self._lock, disk_errors(f"quarantining {path}"):
            directory.mkdir(mode=0o700, exist_ok=True)  # another program may have removed it
            quarantined = self._quarantined()
            number = int(quarantined[-1].name.partition("-")[0]) + 1 if quarantined else 0
            target = directory / f"{number:010d}-{name}"
            try:
                path.rename(target)
            except FileNotFoundError:
                return
            fsync_directory(path.parent)
            fsync_directory(directory)
            Path(f"{target}.reason").write_text(reason + "\n")
            for old in quarantined[: max(0, len(quarantined) + 1 - QUARANTINE_KEPT)]:
                self._remove_quarantined(old)

    def quarantine_document(self, path: Path, damage: CorruptionError) -> None:
        """Move a damaged document to quarantine. One that only cannot be read stays in place."""
        if not isinstance(damage, UnreadableError):
            self.quarantine(path, str(damage))

    def _empty_quarantine(self) -> bool:
        """Remove all quarantined files. Return False if there were none."""
        directory = self.root / QUARANTINE
        with self._lock, disk_errors(f"emptying {directory}"):
            if not directory.is_dir():
                return False  # another program removed it
            quarantined = self._quarantined()
            for old in quarantined:
                self._remove_quarantined(old)
        return bool(quarantined)

    def why_quarantined(self, path: Path) -> str | None:
        """Return why a file of this volume was quarantined last, and where it is. None if it was not.

        The answer comes from the disk: another process, or an earlier run, may have moved the file.
        """
        name = _quarantined_name(path.relative_to(self.root))
        with suppress(OSError):
            for found in reversed(self._quarantined()):
                if found.name.partition("-")[2] == name:
                    reason = Path(f"{found}.reason").read_text(errors="replace").strip()
                    return f"{reason} (the file is kept as {found})"
        return None

    def _quarantined(self) -> list[Path]:
        """Return the quarantined files, the oldest first. Other files in the directory are ignored."""
        return sorted(
            p for p in (self.root / QUARANTINE).iterdir() if _QUARANTINED.fullmatch(p.name)
        )

    def _remove_quarantined(self, path: Path) -> None:
        self.budget.add(-path.lstat().st_size)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # what lay at the name of a file was a directory
        else:
            path.unlink()
        Path(f"{path}.reason").unlink(missing_ok=True)


def _quarantined_name(relative: Path) -> str:
    return "--".join(relative.parts)
