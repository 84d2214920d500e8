"""State of the slots that the sidecar owns, and decisions about the buffered ones: report, write, seal.

Where a rank has three slots or more, a step that is staged while an earlier one is being written is held.
Its slot is digested, so that the gang can commit the step at level memory, and is written to the node
tier only after the coordinator has chosen the step for all ranks (coordinator/choice.py, ADR 0033).

Nothing here does I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import DigestedShard, RankBuffered, ShardInfo, Stage
from holdfast_core.shards.record import ShardRecord
from holdfast_core.shm.slot_file import SlotFile


class Where(Enum):
    """Stage of an owned slot: being digested, buffered in memory, or being written to the node tier."""

    DIGESTING = auto()
    BUFFERED = auto()
    WRITING = auto()


@dataclass(slots=True)
class OwnedSlot:
    """A slot that the sidecar owns, from Stage until it is freed."""

    stage: Stage
    slot: SlotFile
    world_size: int
    where: Where
    was_buffered: bool = False
    """Whether the slot was buffered instead of written immediately. BUFFERED reports buffered slots to the
    coordinator."""
    record: ShardRecord | None = None
    """Digest and header of a buffered slot; None until it is digested, and for a slot that is written at
    once."""
    digested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the record is known, or when the slot is freed."""
    committed: bool = False
    """Whether the step's manifest is on this node."""
    failed: bool = False
    """Whether a write of the slot failed. Its bytes are good, so a seal tries to write it once more."""
    dropped: bool = False
    """Whether the step was pruned. A buffered slot is freed by `Stager.release`, after the manifest is
    deleted; any other slot when its digest or write has ended."""

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.stage.step, self.stage.round)

    @property
    def pending_write(self) -> bool:
        """Whether the slot has still to be written to the node tier and no write of it is under way."""
        return self.where is not Where.WRITING and not (self.failed or self.dropped)


def info_of(record: ShardRecord) -> ShardInfo:
    """Return the description of a digested shard that messages carry."""
    return ShardInfo(
        record.header.rank, record.header.payload_bytes, record.blake3, record.chunk_table
    )


def digested(record: ShardRecord, *, stored: bool = False, failed: bool = False) -> DigestedShard:
    header = record.header
    return DigestedShard(header.step, info_of(record), header.layout, stored, failed)


def buffered_of(
    rank: Rank, round_: RestartRound, owned: Iterable[OwnedSlot], stored: Iterable[ShardRecord]
) -> RankBuffered:
    """Return what BUFFERED reports of one rank to the coordinator of `round_`.

    Args:
        rank: The rank that is reported.
        round_: The current round. Buffered shards of older rounds are left out, because the current round may
            train the same step again to other bytes. A write of an older round that is still under way is
            reported as `writing`, since it occupies the rank.
        owned: All slots that the sidecar owns, of any rank.
        stored: Shards that were buffered and are durable by now, of any rank.
    """
    of_rank = sorted((o for o in owned if o.stage.rank == rank), key=lambda o: o.stage.step)
    waited = [o for o in of_rank if o.was_buffered and not o.dropped and o.stage.round == round_]
    shards = [digested(o.record, failed=o.failed) for o in waited if o.record is not None]
    shards.extend(
        digested(r, stored=True)
        for r in stored
        if (r.header.rank, r.header.round) == (rank, round_)
    )
    return RankBuffered(
        rank,
        tuple(sorted(shards, key=lambda s: s.step)),
        tuple(o.stage.step for o in waited if o.record is None),
        max((o.stage.step for o in of_rank if o.where is Where.WRITING), default=None),
    )


def is_quiet(buffered: Iterable[RankBuffered]) -> bool:
    """Return whether no rank buffers a step, so that BUFFERED has nothing to report.

    Shards that were written without being buffered are reported by PREPARED.
    """
    return not any(entry.shards or entry.digesting for entry in buffered)


def next_write(rank: Rank, owned: Iterable[OwnedSlot], chosen: Step | None) -> OwnedSlot | None:
    """Return the rank's buffered slot of the chosen step, if it may be written now.

    None while another slot of the rank is being written: each rank has at most one write under way.
    """
    of_rank = [o for o in owned if o.stage.rank == rank]
    if any(o.where is Where.WRITING for o in of_rank):
        return None
    ready = (
        o
        for o in of_rank
        if o.where is Where.BUFFERED and o.pending_write and o.stage.step == chosen
    )
    return next(ready, None)


def to_seal(
    owned: Iterable[OwnedSlot], manifests: frozenset[CheckpointId]
) -> tuple[OwnedSlot, ...]:
    """Return the slots that a seal writes: all buffered ones whose manifest is on this node, oldest first.

    The newest one alone would not suffice. Of two such steps, the newer one's manifest may be missing on
    another member; then only the older step can be complete on all members (ADR 0033).
    """
    found = [
        o
        for o in owned
        if o.where is Where.BUFFERED and not o.dropped and o.checkpoint in manifests
    ]
    return tuple(sorted(found, key=lambda o: (o.stage.step, o.stage.rank)))
