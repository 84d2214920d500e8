"""Whole checkpoints in an object tier: manifest, layouts, and shards or packs with references. For tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.support.shards.builders import JOB, JOB_UID, build_manifest, shard_header
from tests.support.shards.placements import Tensor, layout_of, objects_of
from tests.support.shards.shard_files import write_shard

from holdfast_core.drill import DrillRequest
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import RankLayout, layout_digests
from holdfast_core.ids import CheckpointId, Digest, Rank
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import Earlier, plan_pack, shared_with, unshared_index
from holdfast_core.store.tier import ObjectTier

NAMESPACE = "team-a"
CHUNK = 4096
MESH = (2, 2)
"""Two replicas of a state that is cut over two ranks."""
TENSORS = {
    "columns": Tensor("F32", (40, 600), (None, 1)),
    "rows": Tensor("F32", (300, 200), (None, 0)),
    "scale": Tensor("F64", ()),
    "whole": Tensor("I64", (70, 900)),
}

Values = Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A checkpoint in the store."""

    request: DrillRequest
    readers: tuple[DiskShardReader, ...]
    manifest: bytes

    @property
    def checkpoint(self) -> CheckpointId:
        return self.request.checkpoint

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


def values(seed: int) -> Values:
    """Return random values of all tensors."""
    random = np.random.default_rng(seed)
    return {
        fqn: random.integers(0, 1 << 30, tensor.shape).astype(
            {"F32": np.float32, "F64": np.float64, "I64": np.int64}[tensor.dtype]
        )
        for fqn, tensor in TENSORS.items()
    }


def store_step(
    tier: ObjectTier,
    directory: Path,
    step: int,
    saved: Values | Sequence[Values],
    *,
    base: StoredStep | None = None,
    packed: bool = True,
    compressed: bool = False,
    mesh: Sequence[int] = MESH,
    tensors: Mapping[str, Tensor] = TENSORS,
    chunk_bytes: int = CHUNK,
) -> StoredStep:
    """Store a checkpoint of four ranks.

    Args:
        tier: The store.
        directory: Where the shard files are written.
        step: The step.
        saved: The whole tensors, or those of each rank if the replicas differ.
        base: An earlier checkpoint, to which packs may refer.
        packed: Whether shards become packs where they have chunks in common.
        compressed: Whether packs are compressed.
        mesh: The mesh. Its first four ranks are stored.
        tensors: The tensors of the state.
        chunk_bytes: Length of the chunks.
    """
    layouts = [layout_of(tensors, mesh, rank) for rank in range(4)]
    of_ranks = [saved] * 4 if isinstance(saved, Mapping) else saved
    readers = tuple(
        write_shard(
            directory,
            shard_header(
                layout.payload_bytes,
                step=step,
                rank=layout.rank,
                layout=digest_of(layout.to_bytes()),
                chunk_bytes=chunk_bytes,
            ),
            _payload(layout, of_ranks[layout.rank]),
        )
        for layout in layouts
    )
    needs: dict[CheckpointId, int] = {}
    for rank, reader in enumerate(readers):
        tier.put_layout(NAMESPACE, reader.record.ref, layouts[rank].to_bytes())
        own = Trailer(reader.record, reader.table)
        index = None
        if packed:
            group = [Rank(other) for other in range(4) if other % 2 == rank % 2]
            shared = [
                shared_with(own, group, Trailer(readers[other].record, readers[other].table))
                for other in group
            ]
            earlier, allowed = None, set()
            if base is not None:
                stored = tier.stored(NAMESPACE, base.readers[rank].record.ref)
                earlier, allowed = Earlier(stored.trailer, stored.index), {base.checkpoint}
            checkpoint = None if base is None else base.checkpoint
            index = plan_pack(own, shared, earlier, allowed, checkpoint)
        if compressed:
            index = index or unshared_index(own)
        if index is None:
            tier.upload_shard(NAMESPACE, reader)
        elif compressed:
            tier.upload_encoded(NAMESPACE, reader, index, bytes([4] * len(index.places)))
        else:
            tier.upload_pack(NAMESPACE, reader, index)
        for before, count in ({} if index is None else index.earlier()).items():
            needs[before] = needs.get(before, 0) + count
    found = readers[0].record.checkpoint
    tier.put_references(NAMESPACE, JOB_UID, found, needs)
    document = build_manifest(
        JOB,
        [
            (reader.record, layout_digests(layout.to_bytes()))
            for reader, layout in zip(readers, layouts, strict=True)
        ],
        parent=None,
    )
    digest: Digest = tier.put_manifest(NAMESPACE, JOB_UID, found, document)
    return StoredStep(DrillRequest(JOB_UID, found, digest), readers, document)


def _payload(layout: RankLayout, saved: Values) -> bytes:
    data = bytearray(layout.payload_bytes)
    header = payload_plan(layout).header
    data[: len(header)] = header
    for fqn, item in layout.tensors.items():
        cut = tuple(slice(a, a + n) for a, n in zip(item.offsets, item.lengths, strict=True))
        data[item.byte_range.start : item.byte_range.stop] = saved[fqn][cut].tobytes()
    place = layout.objects["state"]
    data[place.start : place.stop] = objects_of(0)
    return bytes(data)
