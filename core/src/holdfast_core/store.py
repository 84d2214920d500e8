"""The local commit, written once above any node tier: used by coordinator and standalone SDK.

A checkpoint exists when its manifest is durable, and is a candidate when its manifest parses and
the shards that the caller needs verify. No pointer to a "latest" one is kept or trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    TierError,
)
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import Layout, merge_layouts, parse_layout
from holdfast_core.format.manifest import JobIdentity, Manifest, ManifestShard, parse_manifest
from holdfast_core.format.record import ShardRecord
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank
from holdfast_core.tiers.base import NodeTier

__all__ = [
    "Candidate",
    "build_manifest",
    "candidates",
    "commit_local",
    "merge_layouts",
]

Skipped = Callable[[CheckpointId, str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that can be restored from this tier, for the ranks that were asked for."""

    manifest: Manifest
    digest: Digest
    layout: Layout


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


def candidates(
    tier: NodeTier,
    job_uid: JobUid,
    ranks: Sequence[Rank] | None = None,
    *,
    skipped: Skipped | None = None,
) -> Iterator[Candidate]:
    """Restorable checkpoints of a job, newest step first, then newest round.

    A checkpoint is yielded when manifest and layout parse and every shard of `ranks` (None: of the
    whole world) is here and verifies, all of its bytes. Bad shards are quarantined. `skipped` hears
    which checkpoint was passed over and why. Lazy: what is older is not read.
    """
    held = sorted((c for uid, c in tier.list_manifests() if uid == job_uid), reverse=True)
    for checkpoint in held:
        try:
            yield _verified(tier, job_uid, checkpoint, ranks)
        except (FormatError, TierError) as error:
            if skipped is not None:
                skipped(checkpoint, str(error))


def _verified(
    tier: NodeTier, job_uid: JobUid, checkpoint: CheckpointId, ranks: Sequence[Rank] | None
) -> Candidate:
    document = tier.get_manifest(job_uid, checkpoint)
    manifest = parse_manifest(document)
    if manifest.job.uid != job_uid or manifest.checkpoint != checkpoint:
        raise CorruptionError(
            f"manifest {checkpoint} of {job_uid} says it is {manifest.checkpoint} of "
            f"{manifest.job.uid}"
        )
    layout = parse_layout(tier.get_layout(manifest.layout))
    wanted = range(manifest.world_size) if ranks is None else ranks
    for rank in wanted:
        ref = manifest.ref(Rank(rank))
        shard = manifest.shards[rank]
        try:
            with tier.open_shard(ref) as reader:
                found = reader.record
                reader.verify()
        except CorruptionError as error:
            tier.quarantine(ref, str(error))
            raise
        if (found.header.payload_bytes, found.chunk_table) != (
            shard.payload_bytes,
            shard.chunk_table,
        ):
            raise CorruptionError(f"shard of {ref}: size or chunk table is not the manifest's")
    return Candidate(manifest, digest_of(document), layout)
