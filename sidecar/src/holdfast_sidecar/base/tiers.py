"""The tiers of this pod, with the threads in which their blocking calls run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, UnreadableError
from holdfast_core.ids import CheckpointId, JobUid, ShardRef, TierName
from holdfast_core.save.place import SavePools
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Pool
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.telemetry import Metrics

_COPY_THREADS = 8


class Pools(SavePools):
    """The thread pools of a sidecar, one for each kind of call that may be slow.

    Calls of one kind do not delay those of another: a store that hangs does not delay a local commit.

    * `shard`, `digest`, `meta`, `read`: those of a save, see `SavePools`.
    * `fill`: read shards from the node tier, and write slots.
    * `copy`: copy the shards of other members to the node tier. There are more threads than members whose
      copies ROUND usually assigns to one worker, so that a member that stalls delays only its own copies.
    * `fetch`: read what ranks wait for, from peers and from the store.
    * `upload`: upload shards. Those of a round that has ended go on until they are done.
    * `store`: all other requests to the store that no rank waits for.
    * `scrub`: read the node tier again, slowly, and shards that may be damaged.
    """

    def __init__(self, *, disk: int, fetch: int, store: int) -> None:
        super().__init__(disk)
        self.fill = Pool("fill", disk)
        self.copy = Pool("copy", _COPY_THREADS)
        self.fetch = Pool("fetch", fetch)
        self.upload = Pool("upload", store)
        self.store = Pool("store", store)
        self.scrub = Pool("scrub", 1)

    async def drain_writes(self, timeout_seconds: float) -> bool:
        """Wait for the calls of `shard` and `meta`, which make the writes that a round fences.

        Return False if the time ran out.
        """
        results = await asyncio.gather(
            self.shard.drain(timeout_seconds), self.meta.drain(timeout_seconds)
        )
        return all(results)

    def close(self, *, wait: bool = False) -> None:
        super().close(wait=wait)
        for pool in (self.fill, self.copy, self.fetch, self.upload, self.store, self.scrub):
            pool.close(wait=wait)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The node tier and the object store of a pod."""

    node: NodeTier
    store: ObjectTier | None
    """None if the job has no object store."""
    pools: Pools

    async def checkpoints(self, job_uid: JobUid) -> frozenset[CheckpointId]:
        """Return the checkpoints of a job whose manifest is on this node."""
        return await self.pools.read.run(self.node.checkpoints, job_uid)

    async def quarantine_if_damaged(
        self, ref: ShardRef, metrics: Metrics
    ) -> CorruptionError | None:
        """Read a whole shard of this node, and quarantine and count it if it does not verify.

        This may take minutes. It delays the scrub only, and neither a seal nor a restore.

        Args:
            ref: The shard.
            metrics: Receives the count.

        Returns:
            The error of the verification. None if the copy is good.

        Raises:
            NotFoundError: The shard is not on this node.
            HoldfastError, OSError: The shard cannot be read.
        """
        damage = await self.pools.scrub.run(self.damage, ref)
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
