"""One object that is read by ranges. The caller verifies the bytes."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field

from holdfast_core.tiers.objects import RangedStore

READS = 2
"""How often bytes that do not verify are read in all. A bit may have flipped in transit."""


@dataclass(frozen=True, slots=True)
class Source:
    """One object of a store."""

    store: RangedStore
    key: str
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when the download has failed or ended. No further request is sent then."""

    def fill(self, start: int, buffer: memoryview) -> None:
        """Read the object's bytes [start, start + len(buffer)). See RangedStore.read_into."""
        self.store.read_into(self.key, start, buffer, self.stopped)

    def last_bytes(self, count: int, size_bytes: int) -> bytes:
        """Return the last `count` bytes of the object, which has `size_bytes` bytes."""
        if not count:
            return b""
        # An anonymous map, whose pages exist only once bytes have arrived: `count` may come from a peer.
        data = memoryview(mmap.mmap(-1, count))
        self.fill(size_bytes - count, data)
        return bytes(data)

    def describe(self) -> str:
        return f"{self.key!r} in {self.store.name}"
