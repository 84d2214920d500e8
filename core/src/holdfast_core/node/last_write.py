"""Record of the last shard that this process wrote for a rank. It decides how the next one is written."""

from __future__ import annotations

import operator
from array import array
from dataclasses import dataclass

from holdfast_core.ids import ShardRef
from holdfast_core.shards.chunk_table import ChunkTable
from holdfast_core.shards.record import ShardHeader, ShardRecord

READ_BACK_EVERY = 64
_WORTH_CLONING = 8
"""One chunk of this many must repeat. Fewer do not pay for a second digest of all chunks."""


@dataclass(frozen=True, slots=True)
class LastWrite:
    """The last shard that this process wrote for a rank."""

    ref: ShardRef
    crcs: array[int]
    """CRC32C of each chunk."""
    number: int
    """Number of the write among this process's writes for the rank, from 0."""
    repeated: int
    """Number of chunks that equalled those of the write before (compared by CRC)."""

    @property
    def repeats(self) -> bool:
        """Whether so many chunks repeated that the next write may clone."""
        return self.repeated * _WORTH_CLONING >= max(1, len(self.crcs))

    @classmethod
    def after(cls, before: LastWrite | None, record: ShardRecord, table: ChunkTable) -> LastWrite:
        crcs = array("I", table.crcs)
        if before is None:
            return cls(record.ref, crcs, 0, 0)
        equal = sum(map(operator.eq, crcs, before.crcs))
        return cls(record.ref, crcs, before.number + 1, equal)

    def repeated_bytes(self, header: ShardHeader) -> int:
        """Return the payload bytes that the next write, of `header`, is expected to clone."""
        return min(self.repeated * header.chunk_bytes, header.payload_bytes)


def to_read_back(last: LastWrite | None, chunks: int) -> range:
    """Return the chunks that are read back after a write: all of a rank's first write, then one in 64.

    Within 64 writes each chunk is read once. A chunk that is cloned at each write is not written again,
    so that only the read-back finds bytes that decay on the disk (ADR 0051).
    """
    if last is None:
        return range(chunks)
    return range((last.number + 1) % READ_BACK_EVERY, chunks, READ_BACK_EVERY)
