"""Which checkpoint of a directory a new run starts from. Pure, but for reading through the tier.

Newest history first: rounds from the highest down (a round begins where an older one was restored),
steps from the highest down within a round. A checkpoint counts only if its manifest can be read and
every shard that it names is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, FormatError, NotFoundError
from holdfast_core.format.manifest import Manifest, manifest_digest, parse_manifest
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound
from holdfast_core.tiers.node import DiskNodeTier

JOB_UID = JobUid("standalone")
"""Every directory holds one job's checkpoints; there is no cluster to give it a uid."""


@dataclass(frozen=True, slots=True)
class Choice:
    manifest: Manifest
    digest: Digest


def next_round(tier: DiskNodeTier, others: Iterable[RestartRound]) -> RestartRound:
    """A round that neither anything on the tier nor `others` carry. Not durable yet: see
    `DiskNodeTier.write_round`."""
    recorded = tier.read_round()
    rounds = [*others]
    rounds += [checkpoint.round for _, checkpoint in tier.list_manifests()]
    rounds += [record.header.round for record in tier.list_shards()]
    if recorded is not None:
        rounds.append(recorded[0])
    return RestartRound(max(rounds, default=-1) + 1)


def candidates(tier: DiskNodeTier) -> list[CheckpointId]:
    found = [checkpoint for uid, checkpoint in tier.list_manifests() if uid == JOB_UID]
    return sorted(found, key=lambda c: (c.round, c.step), reverse=True)


def load_choice(tier: DiskNodeTier, checkpoint: CheckpointId) -> Choice:
    """Raises NotFoundError, CorruptionError or FormatError when it cannot be restored from here."""
    document = tier.get_manifest(JOB_UID, checkpoint)
    manifest = parse_manifest(document)
    missing = [s.rank for s in manifest.shards if tier.find(manifest.ref(s.rank)) is None]
    if missing:
        raise NotFoundError(f"checkpoint {checkpoint}: the shards of ranks {missing} are not there")
    return Choice(manifest, manifest_digest(document))


def choose(tier: DiskNodeTier, rejected: Collection[CheckpointId] = ()) -> Choice | None:
    """The newest complete checkpoint, whatever number of ranks saved it; None in a directory without
    any checkpoint.

    Raises CorruptionError when there are checkpoints and none can be read: a run never silently
    starts from nothing.
    """
    reasons: list[str] = []
    for checkpoint in candidates(tier):
        if checkpoint in rejected:
            reasons.append(f"{checkpoint}: a shard did not verify")
            continue
        try:
            return load_choice(tier, checkpoint)
        except (NotFoundError, CorruptionError, FormatError) as error:
            reasons.append(str(error))
    if reasons:
        raise CorruptionError(
            "the directory holds checkpoints, but none that can be restored: "
            + "; ".join(reasons[:5])
            + "; move them away to start from the beginning"
        )
    return None
