"""The manifest of shards that are durable on node tiers.

A checkpoint exists when its manifest is durable. There is no pointer to the latest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.errors import FormatError
from holdfast_core.format.manifest import JobIdentity, manifest_document
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import Digest
from holdfast_core.shards.record import ShardRecord


def build_manifest(
    job: JobIdentity,
    shards: Iterable[tuple[ShardRecord, LayoutDigests]],
    *,
    parent: Digest | None,
) -> bytes:
    """Return the manifest document of the shards of one (step, round).

    Args:
        job: Identity of the job.
        shards: The shards of all ranks with the digests of their layouts, in any order.
        parent: Digest of the manifest that the round restored from, or None.

    Raises:
        FormatError: A rank is missing or occurs twice, the shards differ in job, step, round or world
            size, or a shard has another layout.
    """
    ordered = sorted(shards, key=lambda shard: shard[0].header.rank)
    if not ordered:
        raise FormatError("manifest: no shards")
    first = ordered[0][0].header
    for rank, (record, layout) in enumerate(ordered):
        header = record.header
        found = (header.job_uid, header.step, header.round, header.world_size, header.rank)
        expected = (job.uid, first.step, first.round, len(ordered), rank)
        if found != expected:
            raise FormatError(
                f"manifest: shard of rank {header.rank} is of (job, step, round, world size, rank) "
                f"{found}, expected {expected}"
            )
        if layout.layout != header.layout:
            raise FormatError(
                f"manifest: shard of rank {header.rank} has layout {header.layout}, expected "
                f"{layout.layout}"
            )
    entries = [
        (record.header.payload_bytes, record.blake3, record.chunk_table, layout)
        for record, layout in ordered
    ]
    return manifest_document(job, ordered[0][0].checkpoint, parent, entries)
