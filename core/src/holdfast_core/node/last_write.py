"""What a process remembers of the last shard that it wrote for a rank, to write and check the next one."""

from __future__ import annotations

import operator
from array import array
from dataclasses import dataclass

from holdfast_core.ids import ShardRef
from holdfast_core.shards.chunk_table import ChunkTable
from holdfast_core.shards.record import ShardRecord

READ_BACK_EVERY = 64
_WORTH_CLONING = 8
"""One chunk of so many: fewer equal ones do not pay for a second digest of all of them."""


@dataclass(frozen=True, slots=True)
class LastWrite:
    ref: ShardRef
    crcs: array[int]
    number: int
    """Of this process's writes for the rank, from 0."""
    repeats: bool
    """Whether at least an eighth of its chunks were those of the write before."""

    @classmethod
    def after(cls, before: LastWrite | None, record: ShardRecord, table: ChunkTable) -> LastWrite:
        crcs = array("I", table.crcs)
        if before is None:
            return cls(record.ref, crcs, 0, repeats=False)
        equal = sum(map(operator.eq, crcs, before.crcs))
        repeats = equal * _WORTH_CLONING >= len(crcs)
        return cls(record.ref, crcs, before.number + 1, repeats)


def to_read_back(last: LastWrite | None, chunks: int) -> range:
    """All chunks of a rank's first write, then one in 64. Within 64 writes each chunk has its turn: the
    bytes of one that is cloned at each write are never written again, and they may rot."""
    if last is None:
        return range(chunks)
    return range((last.number + 1) % READ_BACK_EVERY, chunks, READ_BACK_EVERY)
