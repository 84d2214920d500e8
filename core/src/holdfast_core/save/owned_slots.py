"""State of the slots that the stager owns, and decisions about those that wait: which is written next.

A step that is staged while an earlier one is being written may wait in its slot. In a pod this needs three
slots or more, and the step is written only after the coordinator has chosen it for all ranks
(coordinator/choice.py, ADR 0018), or by a seal. In a folder the steps are written in their order.

Nothing here does I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast_core.ids import CheckpointId, Rank, Step
from holdfast_core.messages.schema import ShardInfo, Stage
from holdfast_core.shards.record import ShardRecord
from holdfast_core.shm.slot_file import SlotFile


class Where(Enum):
    """Stage of an owned slot: it waits, or is being written."""

    WAITING = auto()
    WRITING = auto()


@dataclass(slots=True)
class OwnedSlot:
    """A slot that the stager owns, from Stage until it is freed."""

    stage: Stage
    slot: SlotFile
    world_size: int
    where: Where
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: bool = False
    """Whether the step was pruned while the slot was being written. The shard is then deleted."""

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.stage.step, self.stage.round)


def info_of(record: ShardRecord) -> ShardInfo:
    """Return the description of a digested shard that messages carry."""
    return ShardInfo(
        record.header.rank, record.header.payload_bytes, record.blake3, record.chunk_table
    )


def next_write(rank: Rank, owned: Iterable[OwnedSlot], chosen: Step | None) -> OwnedSlot | None:
    """Return the rank's waiting slot of the chosen step, if it may be written now.

    None while another slot of the rank is being written: each rank has at most one write under way.
    """
    of_rank = [o for o in owned if o.stage.rank == rank]
    if any(o.where is Where.WRITING for o in of_rank):
        return None
    ready = (o for o in of_rank if o.where is Where.WAITING and o.stage.step == chosen)
    return next(ready, None)


def to_seal(owned: Iterable[OwnedSlot]) -> tuple[OwnedSlot, ...]:
    """Return the slots that a seal writes: all that wait, oldest first.

    The newest one alone would not suffice. A rank may have handed over a step that another one has not, and
    if time runs out after the older step, all ranks have at least that one.
    """
    found = [o for o in owned if o.where is Where.WAITING]
    return tuple(sorted(found, key=lambda o: (o.checkpoint, o.stage.rank)))
