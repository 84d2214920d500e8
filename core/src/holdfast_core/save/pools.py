"""The thread pools of a save."""

from __future__ import annotations

from holdfast_core.tasks import Pool


class SavePools:
    """Threads for the calls of a save that block.

    Calls of one kind do not delay those of another: a disk that hangs does not delay a comparison in memory.

    * `shard`: write and delete shards where the saves become durable.
    * `digest`: digest slots in memory, while the disk may occupy `shard`.
    * `meta`: write small documents. They must not wait behind gigabytes of shards.
    * `read`: read the index and small documents.
    """

    def __init__(self, disk: int) -> None:
        self.shard = Pool("shard", disk)
        self.digest = Pool("digest", disk)
        self.meta = Pool("meta", 1)
        self.read = Pool("read", disk)

    def close(self, *, wait: bool = False) -> None:
        """End the threads. Calls that run now finish, and with `wait` this returns after them."""
        for pool in (self.shard, self.digest, self.meta, self.read):
            pool.close(wait=wait)
