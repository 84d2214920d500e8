"""Plan of a pack: which chunks of a payload are stored, and which are references to other objects. Pure.

Ranks that hold the same boxes of the same tensors form a group. Each block of chunks has one owner in
the group, on which all ranks agree. A rank leaves a chunk out if

1. the owner has the same chunk: the owner's object stores it or refers to an earlier one that does;
2. otherwise, if an object of an earlier checkpoint stores the chunk for this rank.

A chunk that another rank's object held in the earlier checkpoint is stored again. A reference to it
would need a third object, and a checkpoint would need objects that its packs do not name. Hence a
reference to an earlier checkpoint names an object that stores the chunk, and a reference within the
step names an object that stores it or refers to one that does: at most two hops, and no cycle.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast_core.format.manifest import ManifestShard
from holdfast_core.ids import CheckpointId, Rank, ShardRef
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import HERE, PackIndex, source_order
from holdfast_core.shards.record import ChunkTable

BLOCK_CHUNKS = 16
"""Consecutive chunks with the same owner: 4 MiB, so that a restore requests few long ranges. All ranks of
a step must use the same number, because they must agree on the owners."""
MAX_GROUP = 64
"""Maximum ranks in a group. Each rank requests the chunk tables of all others."""
LEAST_SHARE = 8
"""A pack must leave out at least one chunk in this many. Less is not worth the objects it keeps alive."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """This rank's shard in an earlier checkpoint, as it is stored."""

    trailer: Trailer
    index: PackIndex | None
    """Index of its pack. None if the shard is stored whole."""

    def stored_in(self, chunk: int) -> ShardRef | None:
        """Return the shard whose object stores the chunk.

        Returns None if the chunk is a reference to another rank's object of that earlier step.
        """
        own = self.trailer.record.ref
        source = None if self.index is None else self.index.source(self.index.places[chunk])
        if source is None:
            return own
        return None if source.checkpoint == own.checkpoint else source


def replica_group(shards: Sequence[ManifestShard], rank: Rank) -> tuple[Rank, ...]:
    """Return the ranks that hold the same boxes of tensors at the same payload bytes as `rank`, in order.

    `shards` are the entries of the manifest. `rank` is one of the group. A group has at most MAX_GROUP ranks,
    and all its ranks find the same one.
    """
    lowest = shards[rank].same_boxes
    alike = [shard.rank for shard in shards if shard.same_boxes == lowest]
    start = alike.index(rank) // MAX_GROUP * MAX_GROUP
    return tuple(alike[start : start + MAX_GROUP])


def owner(group: Sequence[Rank], chunk: int) -> Rank:
    """Return the rank of the group that owns the chunk."""
    return group[chunk // BLOCK_CHUNKS % len(group)]


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """Chunks that another rank of the group owns and that have the same bytes in this rank's shard."""

    ref: ShardRef
    chunks: tuple[range, ...]


def shared_with(trailer: Trailer, group: Sequence[Rank], other: Trailer) -> SharedChunks:
    """Return the chunks of `trailer`'s shard that the rank of `other` owns and has with the same bytes."""
    own, theirs = trailer.table, other.table
    rank = other.record.header.rank
    header = trailer.record.header
    if rank == header.rank or other.record.header.chunk_bytes != header.chunk_bytes:
        return SharedChunks(other.record.ref, ())
    found: list[range] = []
    for chunk in range(min(len(own), len(theirs))):
        if owner(group, chunk) != rank or own.digest(chunk) != theirs.digest(chunk):
            continue
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return SharedChunks(other.record.ref, tuple(found))


def plan_pack(
    trailer: Trailer,
    shared: Iterable[SharedChunks],
    earlier: Earlier | None,
    allowed: Collection[CheckpointId],
    base: CheckpointId | None,
) -> PackIndex | None:
    """Return the index of a shard's pack, or None if the shard is to be stored whole.

    Args:
        trailer: The shard.
        shared: Chunks that other ranks of the group own, from `shared_with`.
        earlier: This rank's shard in `base`, if there is one.
        allowed: Earlier checkpoints that the pack may refer to.
        base: The earlier checkpoint to compare with.
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
