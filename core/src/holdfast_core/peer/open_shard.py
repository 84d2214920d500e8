"""Cache of the open shard that a connection reads from.

Opening a shard reads and verifies its chunk table. For a shard of 10 GiB this costs as much as sending half
a range, and a caller requests many ranges of one shard.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast_core.closing import Closing
from holdfast_core.ids import ShardRef
from holdfast_core.tiers.base import ShardReader


class KeptReader(Closing):
    """Reader of one connection that keeps the last shard open. Not thread-safe."""

    def __init__(self, open_shard: Callable[[ShardRef], ShardReader]) -> None:
        self._open = open_shard
        self._last: tuple[ShardRef, ShardReader] | None = None

    def of(self, ref: ShardRef) -> ShardReader:
        """Return a reader of the shard. The caller must not close it. Raises what `open_shard` raises."""
        if self._last is not None and self._last[0] == ref:
            return self._last[1]
        self.close()
        reader = self._open(ref)
        self._last = ref, reader
        return reader

    def close(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].close()
