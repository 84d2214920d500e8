"""What the node tier holds in memory: its shards, and the bytes they and everything else take.

Thread-safe. The disk is the truth; the index is built from it by a scan and follows each change.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import CapacityError
from holdfast_core.ids import CheckpointId, JobUid, ShardRef
from holdfast_core.shards.record import ShardHeader, ShardRecord

VOLUME_ADVICE = "raise spec.checkpoint.node.volume.emptyDir.sizeLimit, or keep fewer steps"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    record: ShardRecord
    path: Path


class NodeIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[ShardRef, IndexEntry] = {}

    def add(self, entry: IndexEntry) -> bool:
        """False where the shard was known already."""
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
        """Shards of this (job, step, round, rank), whatever their payload."""
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

    def records(self) -> tuple[ShardRecord, ...]:
        """In order of job, step, round, rank."""
        with self._lock:
            entries = tuple(self._entries.values())
        return tuple(
            sorted(
                (entry.record for entry in entries),
                key=lambda r: (r.header.job_uid, r.checkpoint, r.header.rank, r.blake3),
            )
        )


class Budget:
    """Bytes that the tier takes and may take: durable files and temporaries that are being written.

    The limit is a part of the volume, because a node volume over its size limit evicts the pod
    instead of refusing the write.
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

    def add(self, size: int) -> None:
        """`size` is negative for what was deleted."""
        with self._lock:
            self._used += size

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used + self._reserved

    def free_bytes(self) -> int:
        with self._lock:
            return self._free()

    def take(self, size: int, what: str) -> None:
        """Hold `size` bytes while a file is written, until `give_back`. Raises CapacityError."""
        with self._lock:
            free = self._free()
            if size > free:
                raise CapacityError(
                    f"{what} into {self._root}: needs {size} bytes, {free} available of "
                    f"{self._limit()} that may be used ({self._used + self._reserved} taken); "
                    f"{self._advice}"
                )
            self._reserved += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self._reserved -= size

    def _limit(self) -> int:
        capacity = self._capacity_bytes
        if capacity == 0:
            volume = os.statvfs(self._root)
            capacity = volume.f_blocks * volume.f_frsize
        return int(capacity * self._fill_limit)

    def _free(self) -> int:
        volume = os.statvfs(self._root)
        available = volume.f_bavail * volume.f_frsize
        if self._capacity_bytes == 0:
            # The whole file system is ours to fill, less what others keep free of it.
            keep_free = volume.f_blocks * volume.f_frsize - self._limit()
            return max(0, available - keep_free - self._reserved)
        return max(0, min(self._limit() - self._used - self._reserved, available))
