"""The local commit, written once above any node tier: used by coordinator and standalone SDK.

A checkpoint exists when its manifest is durable. No pointer to a "latest" one is kept or trusted.
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
    """The manifest of the shards of one (step, round), in any order of ranks.

    Raises FormatError if a rank is missing or there twice, or if shards differ in job, step, round
    or world size, or are not of the layout.
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
    """Make a checkpoint exist on `tier`: 1. the layout, durably; 2. the manifest, put-if-absent.

    The caller has made the shards durable before. Idempotent; returns the manifest's digest. Raises
    AlreadyExistsError where another manifest of this (step, round) is there: an alarm.
    """
    parsed = parse_manifest(manifest)
    if parsed.layout != digest_of(layout):
        raise FormatError(
            f"manifest {parsed.checkpoint} names layout {parsed.layout}, got {digest_of(layout)}"
        )
    parse_layout(layout)
    tier.put_layout(layout)
    return tier.put_manifest(parsed.job.uid, parsed.checkpoint, manifest)
