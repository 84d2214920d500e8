"""The thread pools of a sidecar."""

from __future__ import annotations

import asyncio

from holdfast_core.save.place import SavePools
from holdfast_core.tasks import Pool

_COPY_THREADS = 8


class Pools(SavePools):
    """The thread pools of a sidecar, one for each kind of call that may be slow.

    Calls of one kind do not delay those of another: a store that hangs does not delay a local commit.

    * `shard`, `digest`, `meta`, `read`: those of a save, see `SavePools`.
    * `fill`: read shards from the node tier, and write slots.
    * `copy`: copy the shards of other members to the node tier. There are more threads than members whose
      copies ROUND usually assigns to one worker, so that a member that stalls delays only its own copies.
    * `fetch`: read what ranks wait for, from peers and from the store.
    * `store`: upload, and clean up the store.
    * `scrub`: read the node tier again, slowly.
    """

    def __init__(self, *, disk: int, fetch: int, store: int) -> None:
        super().__init__(disk)
        self.fill = Pool("fill", disk)
        self.copy = Pool("copy", _COPY_THREADS)
        self.fetch = Pool("fetch", fetch)
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
        for pool in (self.fill, self.copy, self.fetch, self.store, self.scrub):
            pool.close(wait=wait)
