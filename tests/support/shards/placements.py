"""Ranks that hold parts of the same tensors: meshes, shards, payloads and layouts.

A dimension is cut into shards as `torch.chunk` cuts it: equal pieces, of which the last may be shorter or
empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.support.shards.builders import pack_objects

from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import ManifestShard, manifest_shards
from holdfast_core.format.payload import plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, layout_digests
from holdfast_core.ids import Rank, ShardInfo
from holdfast_core.reshard.boxes import Box
from holdfast_core.reshard.plan import Move, SliceSearch, by_source, reads_of

Placement = Sequence[int | None]
"""For each dimension of the mesh, the dimension of the tensor that it cuts, or None for a replica."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A global tensor and its placement on a mesh. Without a placement every rank holds it whole."""

    dtype: str
    shape: tuple[int, ...]
    placement: Placement | None = None


def box_of(tensor: Tensor, mesh: Sequence[int], rank: int) -> Box:
    """Return the part that `rank` holds. The last dimension of the mesh varies fastest with the rank."""
    offsets, lengths = [0] * len(tensor.shape), list(tensor.shape)
    if tensor.placement is not None:
        for axis, dimension in enumerate(tensor.placement):
            if dimension is None:
                continue
            index = rank // math.prod(mesh[axis + 1 :]) % mesh[axis]
            piece = -(-lengths[dimension] // mesh[axis])
            start = min(index * piece, lengths[dimension])
            offsets[dimension] += start
            lengths[dimension] = min(piece, lengths[dimension] - start)
    if 0 in lengths:
        offsets = [0] * len(offsets)
    return Box(tuple(offsets), tuple(lengths))


def layout_of(
    tensors: Mapping[str, Tensor],
    mesh: Sequence[int],
    position: int,
    objects_bytes: int = 64,
    *,
    rank: int | None = None,
) -> RankLayout:
    """Return the layout of a rank that saves its part of every tensor.

    `position` is its place in the mesh, which is its rank unless another one is given.
    """
    boxes = {fqn: box_of(tensor, mesh, position) for fqn, tensor in tensors.items()}
    planned = plan_payload(
        ((fqn, tensor.dtype, boxes[fqn].lengths) for fqn, tensor in tensors.items()), objects_bytes
    )
    return RankLayout(
        rank=Rank(position if rank is None else rank),
        tensors={
            fqn: TensorSlice(
                tensor.dtype,
                tensor.shape,
                boxes[fqn].offsets,
                boxes[fqn].lengths,
                planned.byte_range(fqn),
            )
            for fqn, tensor in tensors.items()
        },
        objects={"state": planned.objects},
        payload_bytes=planned.total_bytes,
    )


def shards_of(layouts: Sequence[RankLayout]) -> tuple[ManifestShard, ...]:
    """Return the entries of a manifest for ranks with these layouts. The digests of their bytes are equal."""
    some = digest_of(b"")
    return manifest_shards(
        [
            (
                ShardInfo(Rank(rank), layout.payload_bytes, some, some),
                layout_digests(layout.to_bytes()),
            )
            for rank, layout in enumerate(layouts)
        ]
    )


def plan(
    wanted: RankLayout,
    world_size: int,
    shards: Sequence[ManifestShard],
    read: Callable[[Rank], RankLayout],
    missing: Mapping[Rank, str] | None = None,
) -> tuple[Move, ...]:
    """Search with layouts that `read` returns at once. See `SliceSearch`."""
    search = SliceSearch(wanted, world_size, shards, missing or {})
    while (rank := search.next()) is not None:
        search.add(rank, read(rank))
    return search.moves()


def planned(
    wanted: RankLayout,
    layouts: Sequence[RankLayout],
    world_size: int,
    missing: Mapping[Rank, str] | None = None,
) -> tuple[Move, ...]:
    """Return the plan of a rank of `world_size` from a checkpoint of ranks with these layouts."""
    return plan(wanted, world_size, shards_of(layouts), layouts.__getitem__, missing)


def bytes_read(moves: Iterable[Move], payload_bytes: Sequence[int], chunk_bytes: int) -> int:
    """Return how many payload bytes a plan reads. `payload_bytes` is indexed by old rank."""
    return sum(
        read.span.length_bytes
        for rank, group in by_source(moves).items()
        for read in reads_of(group, payload_bytes[rank], chunk_bytes)
    )


def objects_of(rank: int, objects_bytes: int = 64) -> bytes:
    return pack_objects({"state": {"saved by": rank}}, objects_bytes)


def transformer(layers: int, placement: Placement | None, words: int = 128256) -> dict[str, Tensor]:
    """Return some layers of a model of 1.2e9 parameters in fp32, with Adam's two tensors for each
    parameter.

    The cost of a layer does not depend on how many there are, so tests can use few.
    """
    width, inner = 2048, 8192
    shapes = {"up": (inner, width), "gate": (inner, width), "down": (width, inner)}
    shapes |= {name: (width, width) for name in "qkvo"}
    tensors: dict[str, Tensor] = {}
    for part in ("model", "exp_avg", "exp_avg_sq"):
        tensors[f"{part}.words"] = Tensor("F32", (words, width), placement)
        for layer in range(layers):
            tensors[f"{part}.{layer}.norm"] = Tensor("F32", (width, 1), None)
            for name, shape in shapes.items():
                tensors[f"{part}.{layer}.{name}"] = Tensor("F32", shape, placement)
    return tensors
