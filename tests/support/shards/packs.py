"""Ranks that hold the same tensors, with the uploads that their sidecars would plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tests.support.shards.builders import shard_header

from holdfast_core.ids import CheckpointId, Rank
from holdfast_core.shards.file import CHUNK_BYTES, Trailer
from holdfast_core.shards.pack import Earlier, PackIndex, pack_index, plan_pack, shared_with
from holdfast_core.shards.stream import PayloadDigester


@dataclass(frozen=True, slots=True)
class Saved:
    """One step of a group of ranks.

    `packs` are in order of rank; None means that the shard is stored whole.
    """

    trailers: tuple[Trailer, ...]
    packs: tuple[PackIndex | None, ...]

    @property
    def checkpoint(self) -> CheckpointId:
        return self.trailers[0].record.checkpoint

    @property
    def needs(self) -> dict[CheckpointId, int]:
        """Payload bytes that each earlier checkpoint stores for these packs, as the coordinator adds them
        up.
        """
        found: dict[CheckpointId, int] = {}
        for pack in self.packs:
            for earlier, count in ({} if pack is None else pack.earlier()).items():
                found[earlier] = found.get(earlier, 0) + count
        return found

    def earlier(self, rank: int) -> Earlier:
        return Earlier(self.trailers[rank], self.packs[rank])

    def upload_bytes(self, rank: int) -> int:
        """Return the size of the object that the rank uploads."""
        pack = self.packs[rank]
        if pack is None:
            return self.trailers[rank].record.file_bytes
        return pack.stored_bytes + len(pack_index(pack))


def trailer_of(
    data: bytes, *, step: int, rank: int, round: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Trailer:
    """Return the trailer of the shard file of this payload."""
    header = shard_header(
        len(data),
        step=step,
        rank=rank,
        round=round,
        world_size=max(4, rank + 1),
        chunk_bytes=chunk_bytes,
    )
    digester = PayloadDigester(header)
    digester.update(memoryview(data))
    return Trailer(*digester.finish())


def plan_ranks(
    trailers: Sequence[Trailer],
    base: Saved | None = None,
    older: Collection[CheckpointId] = (),
    unknown: Mapping[int, Collection[int]] | None = None,
) -> Saved:
    """Plan one step of a group of ranks.

    `unknown` maps a rank to the ranks whose tables it could not get.
    """
    group = [Rank(rank) for rank in range(len(trailers))]
    packs = []
    for rank, trailer in enumerate(trailers):
        missing = (unknown or {}).get(rank, ())
        others = [trailers[r] for r in group if r != rank and r not in missing]
        shared = [shared_with(trailer, group, other) for other in others]
        before = base.earlier(rank) if base is not None and rank < len(base.trailers) else None
        checkpoint = None if base is None else base.checkpoint
        allowed = {*older} if checkpoint is None else {checkpoint, *older}
        packs.append(plan_pack(trailer, shared, before, allowed, checkpoint))
    return Saved(tuple(trailers), tuple(packs))
