"""The local commit on any node tier. The coordinator and the standalone SDK use it.

A checkpoint exists when its manifest is durable. There is no pointer to the latest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.errors import FormatError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import merge_layouts, parse_layout
from holdfast_core.format.manifest import JobIdentity, Manifest, ManifestShard, parse_manifest
from holdfast_core.ids import Digest
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import NodeTier

__all__ = [
    "build_manifest",
    "commit_local",
    "merge_layouts",
]


def build_manifest(
    job: JobIdentity,
    records: Iterable[ShardRecord],
    *,
    parent: Digest | None,
    layout: bytes,
) -> bytes:
    """Return the manifest document of the shards of one (step, round).

    Args:
        job: Identity of the job.
        records: The shards of all ranks, in any order.
        parent: Digest of the manifest that the round restored from, or None.
        layout: The layout document of all ranks.

    Raises:
        FormatError: A rank is missing or occurs twice, the shards differ in job, step, round or world
            size, or a shard does not match the layout.
    """
    ordered = sorted(records, key=lambda record: record.header.rank)
    if not ordered:
        raise FormatError("manifest: no shards")
    first = ordered[0].header
    parts = parse_layout(layout).ranks
    for record in ordered:
        header = record.header
        found = (header.job_uid, header.step, header.round, header.world_size)
        expected = (job.uid, first.step, first.round, len(ordered))
        if found != expected:
            raise FormatError(
                f"manifest: shard of rank {header.rank} is of (job, step, round, world size) "
                f"{found}, expected {expected}"
            )
        if header.rank >= len(parts) or parts[header.rank].layout != header.layout:
            raise FormatError(f"manifest: shard of rank {header.rank} has another layout")
        if parts[header.rank].payload_bytes != header.payload_bytes:
            raise FormatError(f"manifest: shard of rank {header.rank} has another size")
    return Manifest(
        job=job,
        step=first.step,
        restart_round=first.round,
        world_size=first.world_size,
        parent=parent,
        layout=digest_of(layout),
        shards=tuple(
            ManifestShard(
                record.header.rank, record.header.payload_bytes, record.blake3, record.chunk_table
            )
            for record in ordered
        ),
    ).to_bytes()


def commit_local(tier: NodeTier, layout: bytes, manifest: bytes) -> Digest:
    """Write the layout, then the manifest, which makes the checkpoint exist on `tier`. Idempotent.

    The caller has made the shards durable before.

    Returns:
        The manifest's digest.

    Raises:
        AlreadyExistsError: Another manifest of this (step, round) exists, which violates I3.
        FormatError: A document is not valid, or the manifest names another layout.
    """
    parsed = parse_manifest(manifest)
    if parsed.layout != digest_of(layout):
        raise FormatError(
            f"manifest {parsed.checkpoint} names layout {parsed.layout}, found {digest_of(layout)}"
        )
    parse_layout(layout)
    tier.put_layout(layout)
    return tier.put_manifest(parsed.job.uid, parsed.checkpoint, manifest)
