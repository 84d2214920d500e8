"""Slots that the sidecar owns, and what is said and decided about those that wait in memory. No I/O
but the digest of a slot.

Where a rank has three slots or more, a step that comes while an earlier one is being written waits:
digested, so that the gang can commit it in memory, and not written before the coordinator has chosen
it for all ranks (choice.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from holdfast_core.failpoint import failpoint
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import DigestedShard, RankHolding, ShardInfo, Stage
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester
from holdfast_core.shm.slot_file import SlotFile


class Where(Enum):
    """How far an owned slot is."""

    DIGESTING = auto()
    HELD = auto()
    WRITING = auto()


@dataclass(slots=True)
class OwnedSlot:
    """One slot between Stage and its release."""

    stage: Stage
    slot: SlotFile
    world_size: int
    where: Where
    waited: bool = False
    """It was not written at once: the coordinator is told of it."""
    record: ShardRecord | None = None
    """Of a slot that waited, once it is digested."""
    committed: bool = False
    """The step's manifest is on this node."""
    failed: bool = False
    """A write of it failed. Its bytes are good, so a seal tries once more."""
    dropped: bool = False
    """Nobody wants it any more; it is released as soon as nobody reads it."""

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.stage.step, self.stage.round)

    @property
    def waits(self) -> bool:
        """It is to be written, and is not."""
        return self.where is not Where.WRITING and not (self.failed or self.dropped)


def info_of(record: ShardRecord) -> ShardInfo:
    """How a digested shard is spoken of on the wire."""
    return ShardInfo(
        record.header.rank, record.header.payload_bytes, record.blake3, record.chunk_table
    )


def digested(record: ShardRecord, *, stored: bool = False, failed: bool = False) -> DigestedShard:
    header = record.header
    return DigestedShard(header.step, info_of(record), header.layout, stored, failed)


def holding_of(
    rank: Rank, round_: RestartRound, owned: Iterable[OwnedSlot], stored: Iterable[ShardRecord]
) -> RankHolding:
    """What the coordinator of this round is told of one rank. A late write of an older round makes it
    busy; its step is none of this round, which may train it again to other bytes."""
    mine = sorted((o for o in owned if o.stage.rank == rank), key=lambda o: o.stage.step)
    waited = [o for o in mine if o.waited and not o.dropped and o.stage.round == round_]
    shards = [digested(o.record, failed=o.failed) for o in waited if o.record is not None]
    shards.extend(
        digested(r, stored=True)
        for r in stored
        if (r.header.rank, r.header.round) == (rank, round_)
    )
    return RankHolding(
        rank,
        tuple(sorted(shards, key=lambda s: s.step)),
        tuple(o.stage.step for o in waited if o.record is None),
        max((o.stage.step for o in mine if o.where is Where.WRITING), default=None),
    )


def is_quiet(holding: Iterable[RankHolding]) -> bool:
    """Nothing waits, so that there is nothing to tell: writes at once are told by PREPARED."""
    return not any(said.shards or said.digesting for said in holding)


def next_write(rank: Rank, owned: Iterable[OwnedSlot], chosen: Step | None) -> OwnedSlot | None:
    """The slot to write now: that of the chosen step. One at a time for each rank."""
    mine = [o for o in owned if o.stage.rank == rank]
    if any(o.where is Where.WRITING for o in mine):
        return None
    ready = (o for o in mine if o.where is Where.HELD and o.waits and o.stage.step == chosen)
    return next(ready, None)


def to_seal(
    owned: Iterable[OwnedSlot], manifests: frozenset[CheckpointId]
) -> tuple[OwnedSlot, ...]:
    """What a seal writes, oldest first: everything whose manifest is on this node. Of two such steps
    every member has the older one's manifest, and only the older one may be complete everywhere."""
    found = [
        o for o in owned if o.where is Where.HELD and not o.dropped and o.checkpoint in manifests
    ]
    return tuple(sorted(found, key=lambda o: (o.stage.step, o.stage.rank)))


def digest_slot(header: ShardHeader, slot: SlotFile) -> ShardRecord:
    """Blocking: one pass over the payload in memory. Raises what `SlotFile.read_into` raises."""
    digester = PayloadDigester(header)
    for piece in slot.pieces(0, header.payload_bytes):
        digester.update(piece)
    failpoint("memory.after_digest")
    record, _ = digester.finish()
    return record
