"""Chooses the checkpoint of a directory from which a new run starts.

The order is newest history first: by round from the highest down (each round begins where an older
checkpoint was restored), and by step from the highest down within a round. A checkpoint counts only if
its manifest can be read and every shard that it names exists.
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
"""Job UID in every directory. A directory holds one job's checkpoints, and no cluster assigns a UID."""

_MAX_ATTEMPTS = 100
"""Number of attempts to choose while another run changes the directory."""


@dataclass(frozen=True, slots=True)
class Choice:
    manifest: Manifest
    digest: Digest


def next_round(tier: DiskNodeTier, others: Iterable[RestartRound]) -> RestartRound:
    """Return a round above all rounds of the tier and of `others`.

    This does not reserve the round, see `holdfast.directory.rounds`.
    """
    rounds = [*others]
    rounds += [checkpoint.round for _, checkpoint in tier.list_manifests()]
    rounds += [record.header.round for record in tier.list_shards()]
    return RestartRound(max(rounds, default=-1) + 1)


def candidates(tier: DiskNodeTier) -> list[CheckpointId]:
    """Return the committed checkpoints of the tier, in the order in which `choose` tries them."""
    return _newest_first(tier.list_manifests())


def committed(root: Path) -> list[CheckpointId]:
    """Return the committed checkpoints of a folder, in the order in which `choose` tries them.

    This reads only the names of files, so that another process may write to the folder.
    """
    return _newest_first(manifests_in(root / "tier"))


def older_than(root: Path, step: Step) -> int:
    """Return the number of checkpoints of a folder whose step is lower than `step`."""
    return sum(checkpoint.step < step for checkpoint in committed(root))


def load_choice(tier: DiskNodeTier, checkpoint: CheckpointId) -> Choice:
    """Load the manifest of `checkpoint` and check that all its shards exist.

    Raises NotFoundError, CorruptionError or FormatError when the checkpoint cannot be restored from here.
    """
    document = tier.get_manifest(JOB_UID, checkpoint)
    manifest = parse_manifest_of(document, JOB_UID, checkpoint)
    missing = [s.rank for s in manifest.shards if tier.look_up(manifest.ref(s.rank)) is None]
    if missing:
        raise NotFoundError(f"checkpoint {checkpoint}: the shards of ranks {missing} do not exist")
    return Choice(manifest, manifest_digest(document))


def choose(tier: DiskNodeTier, rejected: Collection[CheckpointId] = ()) -> Choice | None:
    """Return the newest complete checkpoint, or None in a directory without checkpoints.

    It may have been saved by any number of ranks. Another run may commit newer checkpoints and prune older
    ones during the search. If a checkpoint cannot be loaded and the list has changed, the search begins
    again, so that a pruned checkpoint leads neither to an older step nor to an error.

    Raises CorruptionError when there are checkpoints and none can be read, so that a run never silently
    starts from the beginning. Raises UnavailableError when the list changes in every attempt.
    """
    for _ in range(_MAX_ATTEMPTS):
        listed = candidates(tier)
        choice, reasons = _first_that_loads(tier, listed, rejected)
        if not reasons or candidates(tier) == listed:
            break
    else:
        raise UnavailableError(
            f"the checkpoints changed {_MAX_ATTEMPTS} times while they were read: another run saves and "
            "prunes here faster than they can be read. Keep more of them, or try again"
        )
    if choice is None and reasons:
        raise CorruptionError(
            "the directory has checkpoints, but none that can be restored: "
            + "; ".join(reasons[:5])
            + "; move them away to start without a checkpoint"
        )
    return choice


def _first_that_loads(
    tier: DiskNodeTier, listed: Iterable[CheckpointId], rejected: Collection[CheckpointId]
) -> tuple[Choice | None, list[str]]:
    """Return the first checkpoint that loads, and the reasons why those before it do not."""
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
