"""Which checkpoint of a directory a new run starts from. Pure, but for reading through the tier.

Newest history first: rounds from the highest down (a round begins where an older one was restored),
steps from the highest down within a round. A checkpoint counts only if its manifest can be read and
every shard that it names is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import CorruptionError, FormatError, NotFoundError, UnavailableError
from holdfast_core.format.manifest import Manifest, manifest_digest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier, manifests_in

JOB_UID = JobUid("standalone")
"""Every directory holds one job's checkpoints; there is no cluster to give it a uid."""

_LOOKS = 100
"""At a directory in which another run trains."""


@dataclass(frozen=True, slots=True)
class Choice:
    manifest: Manifest
    digest: Digest


def next_round(tier: DiskNodeTier, others: Iterable[RestartRound]) -> RestartRound:
    """A round that neither anything on the tier nor `others` carry. Not taken yet: see
    `holdfast.directory.rounds`."""
    rounds = [*others]
    rounds += [checkpoint.round for _, checkpoint in tier.list_manifests()]
    rounds += [record.header.round for record in tier.list_shards()]
    return RestartRound(max(rounds, default=-1) + 1)


def candidates(tier: DiskNodeTier) -> list[CheckpointId]:
    return _newest_first(tier.list_manifests())


def committed(root: Path) -> list[CheckpointId]:
    """The checkpoints of a folder that another process writes, in the order in which `choose` tries
    them. Reads names alone."""
    return _newest_first(manifests_in(root / "tier"))


def older_than(root: Path, step: Step) -> int:
    """How many checkpoints of lower steps a folder holds."""
    return sum(checkpoint.step < step for checkpoint in committed(root))


def load_choice(tier: DiskNodeTier, checkpoint: CheckpointId) -> Choice:
    """Raises NotFoundError, CorruptionError or FormatError when it cannot be restored from here."""
    document = tier.get_manifest(JOB_UID, checkpoint)
    manifest = parse_manifest_of(document, JOB_UID, checkpoint)
    missing = [s.rank for s in manifest.shards if tier.look_up(manifest.ref(s.rank)) is None]
    if missing:
        raise NotFoundError(f"checkpoint {checkpoint}: the shards of ranks {missing} are not there")
    return Choice(manifest, manifest_digest(document))


def choose(tier: DiskNodeTier, rejected: Collection[CheckpointId] = ()) -> Choice | None:
    """The newest complete checkpoint, whatever number of ranks saved it; None in a directory without
    any checkpoint.

    A run that trains in the directory meanwhile commits newer checkpoints and prunes older ones. Where
    that shows, the search begins again: what was pruned is no reason for an older step, nor for an error.

    Raises CorruptionError when there are checkpoints and none can be read: a run never silently
    starts from nothing. Raises UnavailableError when the directory does not hold still.
    """
    for _ in range(_LOOKS):
        listed = candidates(tier)
        choice, reasons = _first_that_loads(tier, listed, rejected)
        if not reasons or candidates(tier) == listed:
            break
    else:
        raise UnavailableError(
            f"the checkpoints changed {_LOOKS} times while they were looked at: another run saves and "
            "prunes here faster than they can be read; keep more of them, or try again"
        )
    if choice is None and reasons:
        raise CorruptionError(
            "the directory holds checkpoints, but none that can be restored: "
            + "; ".join(reasons[:5])
            + "; move them away to start from the beginning"
        )
    return choice


def _first_that_loads(
    tier: DiskNodeTier, listed: Iterable[CheckpointId], rejected: Collection[CheckpointId]
) -> tuple[Choice | None, list[str]]:
    """With the reasons why those before it do not."""
    reasons: list[str] = []
    for checkpoint in listed:
        if checkpoint in rejected:
            reasons.append(f"{checkpoint}: a shard did not verify")
            continue
        try:
            return load_choice(tier, checkpoint), reasons
        except (NotFoundError, CorruptionError, FormatError) as error:
            reasons.append(str(error))
    return None, reasons


def _newest_first(manifests: Iterable[tuple[JobUid, CheckpointId]]) -> list[CheckpointId]:
    found = [checkpoint for uid, checkpoint in manifests if uid == JOB_UID]
    return sorted(found, key=lambda c: (c.round, c.step), reverse=True)
