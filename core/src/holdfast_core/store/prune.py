"""Decisions about which checkpoints may be deleted from the store. Pure functions.

Why no interleaving of a deletion with an upload loses a byte: ADR 0023.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta

from holdfast_core.ids import CheckpointId, RestartRound

STALE_UPLOADS = timedelta(hours=24)
"""Age from which what an interrupted upload left is removed. An S3 store charges for it until then."""
QUIET = timedelta(hours=1)
"""Objects of a checkpoint are deleted only if none of them was written for this long.
A coordinator that was replaced, without a record of it yet, has finished or given up its commit by then."""


def dead(
    checkpoints: Collection[CheckpointId],
    manifests: Collection[CheckpointId],
    uploading: Collection[CheckpointId],
    round_: RestartRound,
) -> frozenset[CheckpointId]:
    """Return those of `checkpoints` that do not exist and never will.

    Such a checkpoint has no manifest and is not being uploaded. It belongs to an older restart round than
    `round_`, or to `round_` and to a step before the newest step of `round_` that has a manifest.
    Checkpoints of a newer round belong to another coordinator, which may be uploading them now.

    Args:
        checkpoints: Checkpoints of which objects or references are stored.
        manifests: Checkpoints that have a manifest.
        uploading: Checkpoints that are being uploaded, or may be.
        round_: Restart round of the coordinator that deletes.
    """
    newest = max((c.step for c in manifests if c.round == round_), default=None)
    return frozenset(
        c
        for c in checkpoints
        if c not in manifests
        and c not in uploading
        and (c.round < round_ or (c.round == round_ and newest is not None and c.step < newest))
    )


def most_needed(needs: Mapping[CheckpointId, int], limit: int) -> tuple[CheckpointId, ...]:
    """Return at most `limit` checkpoints, those that store the most bytes first.

    Of two that store equally many, the newer one comes first.
    """
    order = sorted(needs, key=lambda c: (needs[c], c), reverse=True)
    return tuple(order[:limit])
