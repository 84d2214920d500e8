"""Where the node tier keeps the files of a job."""

from __future__ import annotations

from pathlib import Path

from holdfast_core.errors import TierError
from holdfast_core.format.keys import LAYOUTS, checked_job_uid, manifest_key, shard_key
from holdfast_core.ids import CheckpointId, JobUid, ShardRef
from holdfast_core.node.documents import ROUND_FILE
from holdfast_core.node.volume import QUARANTINE, SPARE

LOCK_FILE = ".layouts.lock"
RESERVED = frozenset({QUARANTINE, LAYOUTS, SPARE, ROUND_FILE, LOCK_FILE})
"""Names below the root of a tier that are no directories of jobs."""


def shard_path(root: Path, ref: ShardRef) -> Path:
    return _job_directory(root, ref.job_uid) / shard_key(ref)


def manifest_path(root: Path, job_uid: JobUid, checkpoint: CheckpointId) -> Path:
    return _job_directory(root, job_uid) / manifest_key(checkpoint)


def _job_directory(root: Path, job_uid: JobUid) -> Path:
    if job_uid in RESERVED:
        raise TierError(f"job uid {job_uid!r} is reserved by the node tier")
    return root / checked_job_uid(job_uid)
