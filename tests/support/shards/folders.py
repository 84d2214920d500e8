"""Checkpoints in a folder, of ranks that hold parts of tensors, written without a training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.shards.builders import BytesSource, build_manifest, pack_objects
from tests.support.shards.placements import Tensor, layout_of

from holdfast.directory.choice import JOB_UID
from holdfast_core.format.canonical import digest_of, dumps_canonical
from holdfast_core.format.manifest import JobIdentity
from holdfast_core.format.rank_layout import RankLayout, layout_digests
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.shards.file import ShardHeader

Array = np.ndarray[Any, Any]


def delete_at_once(root: Path) -> None:
    """Delete a folder that a persister uses. A file that it creates meanwhile stops no deletion."""
    deleted = root.with_name(f"{root.name}-deleted")
    root.rename(deleted)
    shutil.rmtree(deleted)


def write_checkpoint(
    root: Path,
    tensors: Mapping[str, tuple[Tensor, Array]],
    mesh: Sequence[int],
    *,
    step: int = 5,
    round: int = 0,
) -> CheckpointId:
    """Commit a checkpoint of whole arrays, of which each rank of the mesh saves its part.

    Each tensor is an entry of the state.
    """
    tier = DiskNodeTier(root / "tier", fill_limit=1.0)
    tier.open()
    encoded = {name: {"$tensor": name} for name in tensors}
    text = dumps_canonical({"state": encoded})
    room = -(-len(text) // 64) * 64
    world_size = int(np.prod(mesh))
    shards = []
    for rank in range(world_size):
        layout = layout_of({n: t for n, (t, _) in tensors.items()}, mesh, rank, room)
        document = layout.to_bytes()
        header = ShardHeader(
            JOB_UID,
            RestartRound(round),
            Step(step),
            layout.rank,
            world_size,
            tier.put_layout(document),
            layout.payload_bytes,
        )
        data = _payload(layout, {n: a for n, (_, a) in tensors.items()})
        record = tier.write_shard(
            header, BytesSource(data + pack_objects({"state": encoded}, room))
        )
        assert header.layout == digest_of(document)
        shards.append((record, layout_digests(document)))
    manifest = build_manifest(JobIdentity("standalone", "run", JOB_UID), shards, parent=None)
    checkpoint = CheckpointId(Step(step), RestartRound(round))
    tier.put_manifest(JOB_UID, checkpoint, manifest)
    return checkpoint


def _payload(layout: RankLayout, wholes: Mapping[str, Array]) -> bytes:
    found = payload_plan(layout)
    parts = [found.header]
    for tensor in found.tensors:
        item = layout.tensors[tensor.fqn]
        box = tuple(
            slice(start, start + length)
            for start, length in zip(item.offsets, item.lengths, strict=True)
        )
        parts.append(np.ascontiguousarray(wholes[tensor.fqn][box]).tobytes())
    return b"".join(parts)


def damage(root: Path, rank: int, offset: int = 100_000) -> Path:
    """Change one byte of a rank's shard and return its path."""
    (path,) = root.rglob(f"rank{rank:06d}-*.shard")
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    return path
