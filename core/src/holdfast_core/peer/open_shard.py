"""The shards of a node tier as objects that a server sends, and the one that a connection keeps open.

Opening a shard reads and verifies its chunk table. For a shard of 10 GiB this costs as much as sending half
a range, and a caller requests many ranges of one shard.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast_core.closing import Closing
from holdfast_core.errors import NotFoundError
from holdfast_core.format.keys import node_key
from holdfast_core.tiers.base import NodeTier, ShardReader


def open_by_key(tier: NodeTier, key: str) -> ShardReader:
    """Open the shard of a key. Raises NotFoundError, and what `NodeTier.open_shard` raises."""
    for record in tier.list_shards():
        if node_key(record.ref) == key:
            return tier.open_shard(record.ref)
    raise NotFoundError(f"this node has no shard {key!r}")


class KeptReader(Closing):
    """Reader of one connection that keeps the last shard open. Not thread-safe."""

    def __init__(self, open_shard: Callable[[str], ShardReader]) -> None:
        self._open = open_shard
        self._last: tuple[str, ShardReader] | None = None

    def of(self, key: str) -> ShardReader:
        """Return a reader of the shard. The caller must not close it. Raises what `open_shard` raises."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self.close()
        reader = self._open(key)
        self._last = key, reader
        return reader

    def close(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].close()
