"""The tiers of this pod, with the threads in which their blocking calls run."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, UnreadableError
from holdfast_core.ids import CheckpointId, JobUid, ShardRef, TierName
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Pool
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.tasks import Pools


@dataclass(frozen=True, slots=True)
class Tiers:
    """The node tier and the object store of a pod."""

    node: NodeTier
    store: ObjectTier | None
    """None if the job has no object store."""
    pools: Pools

    async def checkpoints(self, job_uid: JobUid) -> frozenset[CheckpointId]:
        """Return the checkpoints of a job whose manifest is on this node."""
        found = await self.pools.read.run(self.node.list_manifests)
        return frozenset(checkpoint for uid, checkpoint in found if uid == job_uid)

    async def quarantine_if_damaged(
        self, ref: ShardRef, pool: Pool, metrics: Metrics
    ) -> CorruptionError | None:
        """Read a whole shard of this node, and quarantine and count it if it does not verify.

        Args:
            ref: The shard.
            pool: The threads to read it in.
            metrics: Receives the count.

        Returns:
            The error of the verification. None if the copy is good.

        Raises:
            NotFoundError: The shard is not on this node.
            HoldfastError, OSError: The shard cannot be read or moved.
        """
        damage = await pool.run(self.damage, ref)
        if damage is not None:
            metrics.corruption(TierName.NODE)
            await self.pools.meta.run(self.node.quarantine, ref, damage)
        return damage

    def damage(self, ref: ShardRef) -> CorruptionError | None:
        """Return the error of the shard's verification, or None if the shard is good. Blocks.

        Raises NotFoundError, and UnreadableError if the disk does not return it.
        """
        try:
            with self.node.open_shard(ref) as reader:
                reader.verify()
        except UnreadableError:
            raise  # the bytes may be good
        except CorruptionError as error:
            return error
        return None
