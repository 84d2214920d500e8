"""The objects that a server of the bulk protocol sends, and the one that a connection keeps open.

Opening a shard reads and verifies its chunk table. For a shard of 10 GiB this costs as much as sending half
a range, and a caller requests many ranges of one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from holdfast_core.closing import Closing
from holdfast_core.errors import NotFoundError
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange
from holdfast_core.tiers.base import NodeTier, ShardReader


class OpenObject(Closing, Protocol):
    """An object that is open for reading."""

    @property
    def size_bytes(self) -> int: ...

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        """See tiers.base.ShardReader."""
        ...


OpenByKey = Callable[[str], OpenObject]
"""Opens an object. Raises NotFoundError, CorruptionError, UnavailableError."""


@dataclass(frozen=True, slots=True)
class OpenShard(Closing):
    """The file of a shard of a node tier."""

    reader: ShardReader

    @property
    def size_bytes(self) -> int:
        return self.reader.record.file_bytes

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        return self.reader.read_file(ranges)

    def close(self) -> None:
        self.reader.close()


def shards_of(tier: NodeTier) -> OpenByKey:
    """Return a function that opens the shards of a tier by `format.keys.node_key`."""

    def opened(key: str) -> OpenShard:
        for record in tier.list_shards():
            if node_key(record.ref) == key:
                return OpenShard(tier.open_shard(record.ref))
        raise NotFoundError(f"this node has no shard {key!r}")

    return opened


class KeptObject(Closing):
    """The last object that a connection has opened. Not thread-safe."""

    def __init__(self, opened: OpenByKey) -> None:
        self._opened = opened
        self._last: tuple[str, OpenObject] | None = None

    def of(self, key: str) -> OpenObject:
        """Return the object of a key. The caller must not close it. Raises what `OpenByKey` raises."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self.close()
        found = self._opened(key)
        self._last = key, found
        return found

    def close(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].close()
