"""The commit of a checkpoint in the object store. Its shards, packs and layouts are there already.

1. If packs refer to earlier checkpoints, put the references. From here on every deleter keeps the
   checkpoints that they name.
2. Read the manifests of the bases, the checkpoints that this one was compared with. If all exist, any
   process that deletes one of them later finds the references. If one is gone, a deleter may have listed
   the references before step 1, so nothing is committed.
3. Put the manifest.

This module never deletes references: a delayed DELETE request could remove those of a later commit that
succeeded. The references of a failed commit keep objects longer than needed, until the next sweep.
Why no interleaving loses a byte: ADR 0023.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast_core.errors import NotFoundError
from holdfast_core.format.manifest import Manifest
from holdfast_core.ids import CheckpointId, JobUid
from holdfast_core.messages.schema import Reference
from holdfast_core.shards.pack import MAX_EARLIER
from holdfast_core.store.rules import most_needed
from holdfast_core.store.tier import ObjectTier


def commit(
    tier: ObjectTier,
    namespace: str,
    manifest: Manifest,
    needs: Mapping[CheckpointId, int],
    bases: Collection[CheckpointId],
) -> bool:
    """Commit a checkpoint.

    The call is idempotent: it also succeeds for a checkpoint that is committed already and whose bases
    were deleted since.

    Args:
        tier: The store.
        namespace: Namespace of the job.
        manifest: Manifest of the checkpoint.
        needs: The payload bytes that each earlier checkpoint stores for the packs; maybe none.
        bases: Checkpoints that the packs were compared with; their manifests must still exist.

    Returns:
        False if a base is gone. The ranks whose packs refer to other objects must then upload their shards
        whole.

    Raises:
        AlreadyExistsError: The store holds another manifest of this checkpoint; this needs an alarm.
        HoldfastError: Whatever else the tier raises.
    """
    job_uid, checkpoint = manifest.job.uid, manifest.checkpoint
    if needs:
        tier.put_references(namespace, job_uid, checkpoint, needs)
        kept = all(_exists(tier, namespace, job_uid, base) for base in bases)
        if not kept and not _exists(tier, namespace, job_uid, checkpoint):
            return False
    tier.put_manifest(namespace, job_uid, checkpoint, manifest.to_bytes())
    return True


def references_beside(
    tier: ObjectTier, namespace: str, job_uid: JobUid, base: CheckpointId
) -> tuple[Reference, ...]:
    """Return the checkpoints that store most of the bytes that `base` refers to.

    An upload that is compared with `base` may refer to them, too.
    """
    needs = tier.get_references(namespace, job_uid, base)
    found = most_needed(needs, MAX_EARLIER - 1)
    return tuple(Reference(checkpoint.step, checkpoint.round) for checkpoint in found)


def _exists(tier: ObjectTier, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bool:
    try:
        tier.get_manifest(namespace, job_uid, checkpoint)
    except NotFoundError:
        return False
    return True
