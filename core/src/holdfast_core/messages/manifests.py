"""The manifest of a checkpoint from what its ranks report about their shards."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.format.manifest import JobIdentity, Manifest, manifest_shards
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import CheckpointId, Digest
from holdfast_core.messages.common import ShardInfo


def manifest_document(
    job: JobIdentity,
    checkpoint: CheckpointId,
    parent: Digest | None,
    shards: Iterable[tuple[ShardInfo, LayoutDigests]],
) -> bytes:
    """Return the document. Everyone who knows the shards builds the same bytes.

    Args:
        job: Identity of the job.
        checkpoint: The checkpoint.
        parent: Digest of the manifest that the round restored from.
        shards: The shard of each rank with the digests of its layout, in order of the ranks.

    Raises:
        FormatError: A value is one that no manifest can hold.
    """
    parts = [(s.payload_bytes, s.blake3, s.chunk_table, layout) for s, layout in shards]
    return Manifest(
        job=job,
        step=checkpoint.step,
        restart_round=checkpoint.round,
        world_size=len(parts),
        parent=parent,
        shards=manifest_shards(parts),
    ).to_bytes()
