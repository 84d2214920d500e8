"""The volume of the node tier: its directories, its room, its quarantined and spare files, and its index.

The disk is authoritative. The index of shards in memory is built by a scan and updated with each change. It
is thread-safe.

Spare files (ADR 0018) are the files of deleted shards, which later writes overwrite. A write into blocks
that a file has already is faster than a write into a new file, and the removal of a large file slows down
all writers of its disk. A file passes these states. Each change is durable before the next one begins, so
that a crash leaves the file in one of them:

1. `<name>.shard`: a shard.
2. `.tmp-*` in the same directory: deleted. The next start removes it.
3. `spare/*`: no reader knows this name.
4. `.tmp-*` in the directory of the next shard, locked: it is being overwritten. The next start removes it.
5. `<other name>.shard`: another shard.

Only a file that no process has open is overwritten. A reader that opened the shard before its deletion
would otherwise read bytes of two shards.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from holdfast_core.errors import CapacityError, CorruptionError, HoldfastError, UnreadableError
from holdfast_core.ids import CheckpointId, JobUid, Rank, ShardRef
from holdfast_core.node.files import (
    TEMP_PREFIX,
    DurableDirectories,
    TempFile,
    disk_errors,
    fsync_directory,
)
from holdfast_core.shards.file import ShardHeader, ShardRecord

VOLUME_ADVICE = (
    "free space on the node's disk, raise the size of spec.checkpoint.node.volume, "
    "or keep fewer steps"
)
_UNREADABLE_SECONDS = 60.0
"""Time for which other copies are used instead of a shard that could not be read."""


class NodeIndex:
    """Index of the shards on the disk, whose bytes it adds to the budget. Thread-safe."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._shards: dict[ShardRef, ShardRecord] = {}

    def add(self, record: ShardRecord) -> None:
        """Add or replace a shard."""
        with self._lock:
            known = record.ref in self._shards
            self._shards[record.ref] = record
        if not known:
            self._budget.add(record.file_bytes)

    def remove(self, ref: ShardRef) -> ShardRecord | None:
        """Remove a shard whose file stays, and still takes its bytes."""
        with self._lock:
            return self._shards.pop(ref, None)

    def forget(self, ref: ShardRef) -> None:
        """Remove a shard whose file is gone."""
        if (record := self.remove(ref)) is not None:
            self._budget.add(-record.file_bytes)

    def find(self, ref: ShardRef) -> ShardRecord | None:
        with self._lock:
            return self._shards.get(ref)

    def same_identity(self, header: ShardHeader) -> tuple[ShardRecord, ...]:
        """Return the shards with this (job, step, round, rank) and any payload."""
        wanted = (header.job_uid, header.step, header.round, header.rank)
        with self._lock:
            return tuple(
                record
                for ref, record in self._shards.items()
                if (ref.job_uid, ref.step, ref.round, ref.rank) == wanted
            )

    def of_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> tuple[ShardRef, ...]:
        with self._lock:
            return tuple(
                ref
                for ref in self._shards
                if ref.job_uid == job_uid and ref.checkpoint == checkpoint
            )

    def ranks(self) -> frozenset[tuple[JobUid, Rank]]:
        """Return the ranks of which at least one shard is here."""
        with self._lock:
            return frozenset((ref.job_uid, ref.rank) for ref in self._shards)

    def records(self) -> tuple[ShardRecord, ...]:
        """Return all records in order of job, step, round and rank."""
        with self._lock:
            records = tuple(self._shards.values())
        return tuple(
            sorted(records, key=lambda r: (r.header.job_uid, r.checkpoint, r.header.rank, r.blake3))
        )


class Budget:
    """Account of the bytes that the tier uses and may use. Thread-safe.

    The limit is below the volume's size, because Kubernetes evicts a pod whose volume exceeds its size
    limit instead of refusing the write.
    """

    def __init__(
        self, root: Path, capacity_bytes: int, fill_limit: float, advice: str = VOLUME_ADVICE
    ) -> None:
        self._root = root
        self._advice = advice
        self._capacity_bytes = capacity_bytes
        self._fill_limit = fill_limit
        self._lock = threading.Lock()
        self._used = 0
        self._reserved = 0
        self._reserved_blocks = 0
        self._spare = 0

    def add(self, size: int) -> None:
        """Add the size of a published file; a negative `size` for a deleted one."""
        with self._lock:
            self._used += size

    def set_spare_bytes(self, size: int) -> None:
        """Set the size of all spare files: room that is occupied until the files are taken or removed."""
        with self._lock:
            self._spare = size

    @property
    def used_bytes(self) -> int:
        """Bytes of published files and reservations, without spare files."""
        with self._lock:
            return self._used + self._reserved

    def free_bytes(self) -> int:
        with self._lock:
            return min(self._free_of_limit(), self._free_blocks())

    def take(self, size: int, what: str, blocks: int | None = None) -> None:
        """Reserve the room of a file that is written, until `give_back`.

        Args:
            size: Size of the file. Kubernetes counts it whole, with the blocks that a spare file had.
            what: The file, for the error.
            blocks: Bytes that the file is expected to take from the file system. None means `size`; less
                where the file is a spare one that has blocks.

        Raises:
            CapacityError: There is no room.
        """
        with self._lock:
            wanted = size if blocks is None else blocks
            of_limit, free_blocks = self._free_of_limit(), self._free_blocks()
            if size > of_limit or wanted > free_blocks:
                new = "" if wanted == size else f" ({wanted} of them new)"
                taken = self._used + self._reserved + self._spare
                raise CapacityError(
                    f"{what} into {self._root}: needs {size} bytes{new}, "
                    f"{min(of_limit, free_blocks)} available of "
                    f"{self.limit_bytes} that may be used ({taken} taken); "
                    f"{self._advice}"
                )
            self._reserved += size
            self._reserved_blocks += wanted

    def give_back(self, size: int, blocks: int | None = None) -> None:
        """Release what `take` reserved with the same arguments."""
        with self._lock:
            self._reserved -= size
            self._reserved_blocks -= size if blocks is None else blocks

    @property
    def limit_bytes(self) -> int:
        """Bytes of the volume that may be used."""
        capacity = self._capacity_bytes
        if capacity == 0:
            volume = os.statvfs(self._root)
            capacity = volume.f_blocks * volume.f_frsize
        return int(capacity * self._fill_limit)

    def _free_of_limit(self) -> int:
        """Return the bytes that the size limit of the volume allows. Without one, every number of bytes."""
        if self._capacity_bytes == 0:
            return sys.maxsize
        return max(0, self.limit_bytes - self._used - self._reserved - self._spare)

    def _free_blocks(self) -> int:
        """Return the bytes that the file system has for further files."""
        volume = os.statvfs(self._root)
        available = volume.f_bavail * volume.f_frsize
        if self._capacity_bytes:
            return available
        # Without a size limit the whole file system counts: the share above the limit stays free.
        keep_free = volume.f_blocks * volume.f_frsize - self.limit_bytes
        return max(0, available - keep_free - self._reserved_blocks)


class UnreadableShards:
    """Shards whose files this process could not read, why, and when they are tried again.

    They stay in place and in the index: their bytes may be intact, and a listing must not show them as lost.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._shards: dict[ShardRef, tuple[UnreadableError, float]] = {}

    def note(self, ref: ShardRef, damage: UnreadableError) -> None:
        self._shards[ref] = damage, self._monotonic() + _UNREADABLE_SECONDS

    def forget(self, ref: ShardRef) -> None:
        self._shards.pop(ref, None)

    def why(self, ref: ShardRef) -> UnreadableError | None:
        """Return why the shard could not be read in the last minute, or None. Then it is tried again."""
        found = self._shards.get(ref)
        if found is not None and self._monotonic() < found[1]:
            return UnreadableError(str(found[0]), may_pass=found[0].may_pass)
        self.forget(ref)
        return None


SPARE = "spare"
"""Directory of the spare files, below the root of the tier."""
_LOG = logging.getLogger(__name__)


class SpareFiles:
    """The spare files of a node tier. Thread-safe, and safe beside other processes with the same root.

    The directory is the only state. The budget is updated after each change.
    """

    def __init__(self, directory: Path, directories: DurableDirectories, budget: Budget) -> None:
        self._directory = directory
        self._directories = directories
        self._budget = budget
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        """Held during `count`: an older number must not replace a newer one."""
        self._remover = ThreadPoolExecutor(1, "holdfast-node-remove")

    def put_aside(self, path: Path) -> None:
        """Delete the name of a shard durably, and make its file a spare one. Blocks only briefly.

        An absent file is not an error. Raises OSError.
        """
        temp = path.with_name(_temp_name())
        try:
            path.rename(temp)
        except FileNotFoundError:
            fsync_directory(path.parent)  # an earlier call may have failed there
            return
        except OSError:  # a full disk has no room for another name
            path.unlink(missing_ok=True)
            fsync_directory(path.parent)
            return
        try:
            fsync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                temp.unlink()
            raise
        try:
            self._directories.ensure(self._directory)
            temp.rename(self._directory / temp.name.removeprefix(TEMP_PREFIX))
        except OSError:
            temp.unlink(missing_ok=True)
        self.count()

    def take(self, directory: Path, size_bytes: int) -> TempFile | None:
        """Return the spare file of the most similar size as a temporary file in `directory`.

        Args:
            directory: Directory of the shard that will be written.
            size_bytes: Size of the shard's file.

        Returns:
            The file, with the bytes of the old shard, or None if no spare file of at least half and at most
            twice the size is unused.
        """
        with self._lock:
            try:
                found = self._files()
            except OSError:  # a new file is as good
                return None
            found.sort(key=lambda file: abs(file[1].st_size - size_bytes))
            for path, status in found:
                if size_bytes <= 2 * status.st_size <= 4 * size_bytes:
                    temp = self._taken(path, directory)
                    if temp is not None:
                        return temp
        return None

    def trim(self, most: int) -> None:
        """Remove all but the `most` newest spare files, in a thread that no write waits for."""
        if len(self._files()) > most:
            self._remover.submit(self._trim, most)

    def remove_all(self) -> bool:
        """Remove all spare files now. Return False if there were none. Raises OSError."""
        found = self._files()
        for path, _ in found:
            path.unlink(missing_ok=True)
        self.count()
        return bool(found)

    def count(self) -> int:
        """Tell the budget how many bytes the spare files have, and return the number."""
        with self._counting:
            total = sum(status.st_size for _, status in self._files())
            self._budget.set_spare_bytes(total)
        return total

    # ------------------------------------------------------------------ inside

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found: list[tuple[Path, os.stat_result]] = []
        try:
            paths = list(self._directory.iterdir())
        except FileNotFoundError:  # another program removed the directory
            return found
        for path in paths:
            with suppress(FileNotFoundError):
                found.append((path, path.lstat()))
        return found

    def _taken(self, path: Path, directory: Path) -> TempFile | None:
        """Move an unused spare file to a temporary name in `directory`. Return None if that fails."""
        try:
            fd = _open_unused(path)
        except OSError:
            return None
        temp = TempFile(directory / _temp_name(), fd)
        try:
            with self._directories.lock:
                self._directories.ensure(directory)
                path.rename(temp.path)
            # Without this, a power cut could restore the spare name beside the name of the new shard.
            fsync_directory(self._directory)
        except OSError as error:
            _LOG.debug("the spare file %s cannot be used: %s", path, error)
            temp.discard()
            return None
        self.count()
        return temp

    def _trim(self, most: int) -> None:
        try:
            found = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
            too_many = max(0, len(found) - most)  # writes may have taken some meanwhile
            for path, _ in found[:too_many]:
                path.unlink(missing_ok=True)
            self.count()
        except OSError as error:
            _LOG.warning("removing spare files of %s: %s", self._directory, error)


def _temp_name() -> str:
    # A rename replaces a file of the same name, which might belong to a living process.
    return f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _open_unused(path: Path) -> int:
    """Open and lock a spare file that is not open elsewhere and has no second name. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The kernel grants a write lease only if no other descriptor of the file is open in any process.
        # It sends the signal to a holder whose lease is in the way; the default signal would end it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        if os.fstat(fd).st_nlink != 1:
            raise OSError(f"{path} has other names")
        return fd
    except BaseException:
        os.close(fd)
        raise


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

    def try_quarantine(self, path: Path, reason: str) -> None:
        """Move a damaged shard to quarantine, or leave it in place where the disk refuses that.

        A disk that is full or became read-only must not end a read for which other places have good bytes.
        """
        try:
            self.quarantine(path, reason)
        except HoldfastError as error:
            _LOG.warning("a damaged shard stays in place: %s (its damage: %s)", error, reason)

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
