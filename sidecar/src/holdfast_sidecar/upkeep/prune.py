"""Deleting steps from this node: manifests first, shards after.

What may go is chosen by the coordinator alone (policy.retention); each sidecar checks it again
against what its own ROUND protects.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.messages.schema import Round
from holdfast_core.tiers.base import NodeTier


def protected_steps(message: Round, committed: Iterable[CheckpointId] = ()) -> frozenset[Step]:
    """What a sidecar does not delete in this round, not even on request: held steps, and the restore point
    until a newer step of this round is among the `committed` ones."""
    steps = set(message.holds)
    base = message.restore_point.step
    if base is not None and not any(c.round == message.round and c.step > base for c in committed):
        steps.add(base)
    return frozenset(steps)


def delete_steps(node: NodeTier, job_uid: JobUid, steps: frozenset[Step]) -> int:
    """Blocking. Deletes these steps of every round of this job; returns how many checkpoints."""
    found = {
        checkpoint
        for uid, checkpoint in node.list_manifests()
        if uid == job_uid and checkpoint.step in steps
    } | {
        record.checkpoint
        for record in node.list_shards()
        if record.header.job_uid == job_uid and record.header.step in steps
    }
    for checkpoint in sorted(found):
        node.delete_checkpoint(job_uid, checkpoint)
    return len(found)


def delete_manifests(node: NodeTier, job_uid: JobUid, steps: frozenset[Step]) -> None:
    """Blocking. Of these steps of this job: what is not on this node but in its memory is no checkpoint
    any more."""
    for uid, checkpoint in node.list_manifests():
        if uid == job_uid and checkpoint.step in steps:
            node.delete_checkpoint(uid, checkpoint)


def delete_off_lineage(node: NodeTier, job_uid: JobUid, message: Round) -> int:
    """Blocking. Steps of older rounds above the restore point will be trained again: delete what
    the old rounds left of them, so that nothing can ever restore it.

    Without a restore point nothing is deleted: starting from the beginning is the one choice that
    must not destroy what a person may still want back.
    """
    base = message.restore_point.step
    if base is None or message.restore_point.job_uid not in (None, job_uid):
        return 0
    found = {
        checkpoint
        for uid, checkpoint in node.list_manifests()
        if uid == job_uid and _off_lineage(checkpoint, base, message.round)
    } | {
        record.checkpoint
        for record in node.list_shards()
        if record.header.job_uid == job_uid and _off_lineage(record.checkpoint, base, message.round)
    }
    for checkpoint in sorted(found):
        node.delete_checkpoint(job_uid, checkpoint)
    return len(found)


def delete_orphans(
    node: NodeTier,
    job_uid: JobUid,
    *,
    before: RestartRound,
    below: Step,
    protected: frozenset[Step],
) -> int:
    """Blocking. Shards of older rounds, older than a safe step, whose manifest was never written
    here (a rank's save failed, a round ended first): nothing can restore them. Those of the current
    round are the coordinator's to give up: their manifest may be on its way."""
    committed = {checkpoint for uid, checkpoint in node.list_manifests() if uid == job_uid}
    orphans = {
        record.checkpoint
        for record in node.list_shards()
        if record.header.job_uid == job_uid
        and record.header.round < before
        and record.header.step < below
        and record.header.step not in protected
        and record.checkpoint not in committed
    }
    for checkpoint in sorted(orphans):
        node.delete_checkpoint(job_uid, checkpoint)
    return len(orphans)


def _off_lineage(checkpoint: CheckpointId, base: Step, round_: RestartRound) -> bool:
    return checkpoint.round < round_ and checkpoint.step > base
