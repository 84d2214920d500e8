"""What may be deleted from the store although other checkpoints may need it. Pure.

Why no interleaving of a deleter with an upload loses a byte: ADR 0025.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast_core.format.references import References
from holdfast_core.ids import CheckpointId, RestartRound


def dead(
    checkpoints: Collection[CheckpointId],
    manifests: Collection[CheckpointId],
    uploading: Collection[CheckpointId],
    round_: RestartRound,
) -> frozenset[CheckpointId]:
    """Those of `checkpoints` that do not exist and never will: no manifest, not on their way, and of
    an older round than the deleter's, or before the newest step that exists of its own. What is of a
    newer round is somebody else's, who may be uploading it now."""
    newest = max((c.step for c in manifests if c.round == round_), default=None)
    return frozenset(
        c
        for c in checkpoints
        if c not in manifests
        and c not in uploading
        and (c.round < round_ or (c.round == round_ and newest is not None and c.step < newest))
    )


def needed(
    references: Mapping[CheckpointId, References], ignored: Collection[CheckpointId] = ()
) -> frozenset[CheckpointId]:
    """Every checkpoint whose objects another one needs. The words of `ignored` do not count."""
    return frozenset(
        earlier
        for checkpoint, said in references.items()
        if checkpoint not in ignored
        for earlier in said.bytes_in
    )
