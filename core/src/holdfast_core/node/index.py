"""The node tier's state in memory: the index of its shards, and its space budget. Thread-safe.

The disk is authoritative. The index is built by a scan and updated with each change.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import CapacityError, UnreadableError
from holdfast_core.ids import CheckpointId, JobUid, Rank, ShardRef
from holdfast_core.shards.file import ShardHeader, ShardRecord

VOLUME_ADVICE = (
    "free space on the node's disk, raise the size of spec.checkpoint.node.volume, "
    "or keep fewer steps"
)
_UNREADABLE_SECONDS = 60.0
"""Time for which other copies are used instead of a shard that could not be read."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A shard on the disk."""

    record: ShardRecord
    path: Path


class NodeIndex:
    """Index of the shards on the disk. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[ShardRef, IndexEntry] = {}

    def add(self, entry: IndexEntry) -> bool:
        """Add or replace an entry. Return False if the shard was in the index already."""
        with self._lock:
            known = entry.record.ref in self._entries
            self._entries[entry.record.ref] = entry
            return not known

    def remove(self, ref: ShardRef) -> IndexEntry | None:
        with self._lock:
            return self._entries.pop(ref, None)

    def find(self, ref: ShardRef) -> IndexEntry | None:
        with self._lock:
            return self._entries.get(ref)

    def same_identity(self, header: ShardHeader) -> tuple[IndexEntry, ...]:
        """Return the shards with this (job, step, round, rank) and any payload."""
        wanted = (header.job_uid, header.step, header.round, header.rank)
        with self._lock:
            return tuple(
                entry
                for ref, entry in self._entries.items()
                if (ref.job_uid, ref.step, ref.round, ref.rank) == wanted
            )

    def of_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> tuple[IndexEntry, ...]:
        with self._lock:
            return tuple(
                entry
                for ref, entry in self._entries.items()
                if ref.job_uid == job_uid and entry.record.checkpoint == checkpoint
            )

    def ranks(self) -> frozenset[tuple[JobUid, Rank]]:
        """Return the ranks of which at least one shard is here."""
        with self._lock:
            return frozenset((ref.job_uid, ref.rank) for ref in self._entries)

    def records(self) -> tuple[ShardRecord, ...]:
        """Return all records in order of job, step, round and rank."""
        with self._lock:
            entries = tuple(self._entries.values())
        return tuple(
            sorted(
                (entry.record for entry in entries),
                key=lambda r: (r.header.job_uid, r.checkpoint, r.header.rank, r.blake3),
            )
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
