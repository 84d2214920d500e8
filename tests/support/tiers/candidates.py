"""Oracle that finds the checkpoints that a node tier can restore by reading every byte.

The product reads less: it chooses by manifests and by the inventories of the members, and verifies only
what it restores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, FormatError, TierError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import Manifest, parse_manifest
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank
from holdfast_core.tiers.base import NodeTier

Skipped = Callable[[CheckpointId, str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that this tier can restore for the requested ranks."""

    manifest: Manifest
    digest: Digest
    layouts: tuple[RankLayout, ...]
    """Layouts of the requested ranks."""


def candidates(
    tier: NodeTier,
    job_uid: JobUid,
    ranks: Sequence[Rank] | None = None,
    *,
    skipped: Skipped | None = None,
) -> Iterator[Candidate]:
    """Yield the restorable checkpoints of a job, newest step first, then newest round.

    A checkpoint is yielded if its manifest and the layouts of `ranks` (None: of all ranks) parse, and every
    shard of these is present and all its bytes verify. Corrupt shards are quarantined. `skipped` is called
    with each checkpoint that is skipped and the reason. The iterator is lazy: checkpoints are read when they
    are requested.
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
            f"manifest {checkpoint} of {job_uid} names {manifest.checkpoint} of {manifest.job.uid}"
        )
    layouts: list[RankLayout] = []
    wanted = range(manifest.world_size) if ranks is None else ranks
    for rank in wanted:
        ref = manifest.ref(Rank(rank))
        shard = manifest.shards[rank]
        layouts.append(parse_rank_layout(tier.get_layout(shard.layout)))
        try:
            with tier.open_shard(ref) as reader:
                found = reader.record
                reader.verify()
        except CorruptionError as error:
            tier.quarantine(ref, error)
            raise
        if (found.header.payload_bytes, found.chunk_table) != (
            shard.payload_bytes,
            shard.chunk_table,
        ):
            raise CorruptionError(f"shard of {ref}: size or chunk table is not the manifest's")
    return Candidate(manifest, digest_of(document), tuple(layouts))
