"""The checkpoints of one job in an object store, as a drill reads them.

The index of a pack names the objects of other ranks and of earlier checkpoints in which its chunks are. Each
stored byte is read once: a reference to another rank of the same checkpoint is not followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.format import keys
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef, TierName
from holdfast_core.reading import check_source
from holdfast_core.store.download.shard import OtherObjects, StoredShardReader
from holdfast_core.store.tier import ObjectTier


@dataclass(frozen=True, slots=True)
class StoredJob:
    """Implementation of drill.DrillPlace."""

    store: ObjectTier
    namespace: str
    job_uid: JobUid
    tier: TierName = TierName.OBJECT

    @property
    def name(self) -> str:
        return f"job {self.job_uid} of namespace {self.namespace} in the store"

    def checkpoints(self) -> tuple[CheckpointId, ...]:
        return self.store.list_manifests(self.namespace, self.job_uid)

    def manifest_document(self, checkpoint: CheckpointId) -> bytes:
        return self.store.get_manifest(self.namespace, self.job_uid, checkpoint)

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        return self.store.get_layout(self.namespace, ref, digest)

    def open_shard(self, ref: ShardRef) -> StoredShardReader:
        return self.store.open_shard(self.namespace, ref)

    def verifier(self, checkpoint: CheckpointId) -> StoredVerifier:
        return StoredVerifier(self, checkpoint)


class StoredVerifier:
    """Implementation of drill.ShardVerifier."""

    def __init__(self, job: StoredJob, checkpoint: CheckpointId) -> None:
        self._job = job
        self._checkpoint = checkpoint
        self._objects = job.store.job(job.namespace, job.job_uid)
        self._others = OtherObjects(self._objects.key(keys.shards_prefix(checkpoint)))
        self._earlier: set[CheckpointId] = set()

    def verify(self, ref: ShardRef, shard: ManifestShard) -> int:
        with self._job.open_shard(ref) as source:
            check_source(source.trailer.record, shard)
            if source.stored.index is not None:
                self._earlier.update(source.stored.index.earlier())
            return source.verify(self._others)

    def missing_references(self) -> tuple[CheckpointId, ...]:
        """Return earlier checkpoints whose objects a sweep would not keep for this one."""
        checkpoint = self._checkpoint
        needs = {key.earlier for key in self._objects.needs(checkpoint)}
        return tuple(
            earlier
            for earlier in sorted(self._earlier)
            if earlier not in needs or not self._objects.is_needed_by(earlier, checkpoint)
        )
