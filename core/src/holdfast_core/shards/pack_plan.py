"""Which chunks of a rank's payload are stored, and which are left out because they are stored elsewhere.
Pure.

Ranks that hold the same boxes of the same tensors form a group; each block of chunks has one owner in
it, the same for all. A rank leaves out a chunk

1. that the owner has, byte for byte: the owner stores it at this step or says where it is;
2. that it owns itself, or that differs from the owner's, and that is stored in an object of its own
   since an earlier checkpoint.

A chunk that was the owner's in the earlier checkpoint is not taken from there: it would have to be
looked for at a third place, and what a checkpoint needs would no longer be what its packs name. So
every reference to an earlier checkpoint names an object that stores the chunk, one to the same step an
object that stores it or names one that does: two hops at most, and no cycle.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast_core.format.digest import Blake3
from holdfast_core.format.layout import Layout
from holdfast_core.ids import CheckpointId, Rank, ShardRef
from holdfast_core.shards.chunk_table import ChunkTable
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import HERE, PackIndex, source_order

BLOCK_CHUNKS = 16
"""Chunks in a row with the same owner: 4 MiB, so that a restore asks for few long ranges. All ranks of
a step must use the same number, as they must make the same groups."""
MAX_GROUP = 64
"""Ranks that share: each asks each other one for its chunk table."""
LEAST_SHARE = 8
"""A pack that leaves out less than an eighth is not worth what it keeps alive."""

_RANK_LOCAL = re.compile(r"@rank\d+(~\d+)?\Z")
"""Names of tensors that belong to one rank alone."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """This rank's shard in an earlier checkpoint, as the store has it."""

    trailer: Trailer
    index: PackIndex | None
    """None: it is stored whole."""

    def stored_in(self, chunk: int) -> ShardRef | None:
        """The object that stores a chunk of it; None where another rank's object would have to be
        asked."""
        own = self.trailer.record.ref
        source = None if self.index is None else self.index.source(self.index.places[chunk])
        if source is None:
            return own
        return None if source.checkpoint == own.checkpoint else source


def replica_groups(layout: Layout) -> tuple[tuple[Rank, ...], ...]:
    """Ranks that hold the same boxes of the gang's tensors at the same bytes. In order of their first
    ranks, at most MAX_GROUP in a group. What belongs to one rank alone, and objects, may differ."""
    digests = [Blake3() for _ in layout.ranks]
    sharing = [False] * len(layout.ranks)
    for fqn in sorted(layout.tensors):
        if _RANK_LOCAL.search(fqn):
            continue
        tensor = layout.tensors[fqn]
        for item in tensor.slices:
            span = (item.byte_range.start, item.byte_range.stop)
            said = (fqn, tensor.dtype, tensor.shape, item.offsets, item.lengths, span)
            digests[item.rank].update(repr(said).encode())
            sharing[item.rank] = True
    alike: dict[object, list[Rank]] = {}
    for number, digest in enumerate(digests):
        key = digest.raw() if sharing[number] else number
        alike.setdefault(key, []).append(Rank(number))
    return tuple(
        tuple(ranks[start : start + MAX_GROUP])
        for ranks in alike.values()
        for start in range(0, len(ranks), MAX_GROUP)
    )


def owner(group: Sequence[Rank], chunk: int) -> Rank:
    return group[chunk // BLOCK_CHUNKS % len(group)]


@dataclass(frozen=True, slots=True)
class Shared:
    """Chunks that another rank of the group owns at this step, and that are the same here."""

    ref: ShardRef
    chunks: tuple[range, ...]


def shared_with(trailer: Trailer, group: Sequence[Rank], other: Trailer) -> Shared:
    """What of `trailer`'s shard the rank of `other` stores for it."""
    own, theirs = trailer.table, other.table
    rank = other.record.header.rank
    header = trailer.record.header
    if rank == header.rank or other.record.header.chunk_bytes != header.chunk_bytes:
        return Shared(other.record.ref, ())
    found: list[range] = []
    for chunk in range(min(len(own), len(theirs))):
        if owner(group, chunk) != rank or own.digest(chunk) != theirs.digest(chunk):
            continue
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return Shared(other.record.ref, tuple(found))


def plan_pack(
    trailer: Trailer,
    shared: Iterable[Shared],
    earlier: Earlier | None,
    allowed: Collection[CheckpointId],
    base: CheckpointId | None,
) -> PackIndex | None:
    """The pack of a shard; None where it is to be stored whole.

    `earlier`: the own shard in `base`. `allowed`: earlier checkpoints that may be referred to.
    """
    record, table = trailer.record, trailer.table
    if not len(table):
        return None
    if (
        earlier is not None
        and earlier.trailer.record.header.chunk_bytes != record.header.chunk_bytes
    ):
        earlier = None
    chosen: list[ShardRef | None] = [None] * len(table)
    for other in shared:
        for chunks in other.chunks:
            chosen[chunks.start : chunks.stop] = [other.ref] * len(chunks)
    if earlier is not None:
        for chunk in range(len(table)):
            if chosen[chunk] is None:
                chosen[chunk] = _stored_earlier(table, chunk, earlier, allowed)
    left_out = sum(source is not None for source in chosen)
    if left_out * LEAST_SHARE < len(table):
        return None
    sources = tuple(sorted({s for s in chosen if s is not None}, key=source_order))
    numbers = {source: number for number, source in enumerate(sources, start=1)}
    places = array("H", (HERE if s is None else numbers[s] for s in chosen))
    return PackIndex(
        record.header, record.blake3, table, base if earlier else None, sources, places
    )


def _stored_earlier(
    table: ChunkTable, chunk: int, earlier: Earlier, allowed: Collection[CheckpointId]
) -> ShardRef | None:
    before = earlier.trailer.table
    if chunk >= len(before) or before.digest(chunk) != table.digest(chunk):
        return None
    source = earlier.stored_in(chunk)
    return source if source is not None and source.checkpoint in allowed else None
