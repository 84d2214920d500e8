"""The commit of a checkpoint that needs objects of earlier ones.

1. Its references are put: from here on every deleter keeps what they name.
2. The manifests of what it was compared with are looked for. They are there: whoever deletes them will
   find the references. One is gone: a deleter may have looked before 1; nothing is committed.
3. Layout, then manifest.

References are never taken back here: a delete that was believed lost and comes late could hit those
of a commit that succeeded. Of a commit that failed they keep something too long, until a sweep.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast_core.errors import AlreadyExistsError, NotFoundError
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.references import References, parse_references_of
from holdfast_core.ids import CheckpointId, JobUid
from holdfast_core.store.tier import S3ObjectTier


def commit_shared(
    tier: S3ObjectTier,
    namespace: str,
    manifest: Manifest,
    layout: bytes,
    references: References,
    bases: Collection[CheckpointId],
) -> bool:
    """All shards and packs are there before this is called. False: a base is gone, or an earlier
    attempt said other references; what refers to anything must be uploaded whole. Idempotent: what is
    committed stays so, whatever has been deleted since. Raises what the tier raises;
    AlreadyExistsError for another manifest is an alarm."""
    job_uid, checkpoint = manifest.job.uid, manifest.checkpoint
    said = _said(tier, namespace, job_uid, references)
    vouched = said and all(_exists(tier, namespace, job_uid, base) for base in bases)
    if not vouched and not _exists(tier, namespace, job_uid, checkpoint):
        return False
    tier.put_layout(namespace, job_uid, layout)
    tier.put_manifest(namespace, job_uid, checkpoint, manifest.to_bytes())
    # Once more: another coordinator may have taken it for unneeded before the manifest was there.
    tier.put_layout(namespace, job_uid, layout)
    return True


def _said(tier: S3ObjectTier, namespace: str, job_uid: JobUid, references: References) -> bool:
    """The store has references that name all that these do. Those of an earlier attempt may name
    more: what they name is kept a little longer."""
    try:
        tier.put_references(namespace, job_uid, references)
    except AlreadyExistsError:
        document = tier.get_references(namespace, job_uid, references.checkpoint)
        held = parse_references_of(document, references.checkpoint)
        return held.bytes_in.keys() >= references.bytes_in.keys()
    return True


def _exists(tier: S3ObjectTier, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bool:
    try:
        tier.get_manifest(namespace, job_uid, checkpoint)
    except NotFoundError:
        return False
    return True
