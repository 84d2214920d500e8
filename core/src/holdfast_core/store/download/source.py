"""Ranges of one object: resumed where they broke, counted, not believed. Whoever asks verifies."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from holdfast_core.errors import TierError, UnavailableError
from holdfast_core.store.s3.client import S3Client, S3Request
from holdfast_core.store.s3.retry import Retrier

_PROGRESS_BYTES = 1 << 20
"""A broken transfer that brought this much is not a failure: it goes on with a fresh budget. Less
counts, or a server that cuts after every byte would be asked for ever."""
READS = 2
"""Bytes that do not verify are read once more: a bit may have flipped on the way."""


class StoppedError(TierError):
    """A range that was not asked for because another one failed. Never leaves a download."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where bytes are read from, and with which patience."""

    client: S3Client
    retrier: Retrier
    key: str
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when the download failed elsewhere: nothing more is asked for."""

    def fill(self, start: int, buffer: memoryview) -> None:
        """Bytes [start, start + len(buffer)). Raises NotFoundError, UnavailableError."""
        filled = 0
        while filled < len(buffer):
            rest = buffer[filled:]
            filled += self.retrier.call(
                f"download of {self.key}",
                lambda at=start + filled, rest=rest: self._pull(at, rest),  # type: ignore[misc]
            )

    def last_bytes(self, count: int, size_bytes: int) -> bytes:
        """Of an object of so many bytes."""
        data = bytearray(count)
        if count:
            self.fill(size_bytes - count, memoryview(data))
        return bytes(data)

    def _pull(self, start: int, buffer: memoryview) -> int:
        """One GET. Bytes received: fewer than asked for when it broke after some progress."""
        filled = 0
        if self.stopped.is_set():
            raise StoppedError(f"download of {self.key}: another range failed")
        try:
            with self.client.stream_range(self.key, start, start + len(buffer)) as reply:
                while filled < len(buffer):
                    count = reply.read_into(buffer[filled:])
                    if count == 0:
                        raise UnavailableError(
                            f"{self.describe()}: the reply ended at byte {start + filled}, "
                            f"expected {start + len(buffer)}"
                        )
                    filled += count
        except UnavailableError:
            if filled < _PROGRESS_BYTES:
                raise
        return filled

    def describe(self) -> str:
        return self.client.describe(S3Request("GET", self.key))
