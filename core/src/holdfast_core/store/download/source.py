"""Ranged reads of one object. A broken read is resumed. The caller verifies the bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from holdfast_core.errors import TierError, UnavailableError
from holdfast_core.store.s3.client import S3Client, S3Request
from holdfast_core.store.s3.retry import Retrier

_PROGRESS_BYTES = 1 << 20
"""A transfer that breaks after at least this many bytes is resumed with a new retry budget. A shorter one
counts as a failed attempt, so that a server that disconnects after every byte is not asked without end."""
READS = 2
"""How often bytes that do not verify are read in all. A bit may have flipped in transit."""


class StoppedError(TierError):
    """A range was not requested because another one failed. The download raises that one's error."""


@dataclass(frozen=True, slots=True)
class Source:
    """One object that is read by ranges, with the retry policy of its requests."""

    client: S3Client
    retrier: Retrier
    key: str
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when the download has failed or ended. No further request is sent then."""

    def fill(self, start: int, buffer: memoryview) -> None:
        """Read the object's bytes [start, start + len(buffer)). Raises NotFoundError, UnavailableError."""
        filled = 0
        while filled < len(buffer):
            rest = buffer[filled:]
            filled += self.retrier.call(
                f"download of {self.key}",
                lambda at=start + filled, rest=rest: self._pull(at, rest),  # type: ignore[misc]
            )

    def last_bytes(self, count: int, size_bytes: int) -> bytes:
        """Return the last `count` bytes of the object, which has `size_bytes` bytes."""
        data = bytearray(count)
        if count:
            self.fill(size_bytes - count, memoryview(data))
        return bytes(data)

    def _pull(self, start: int, buffer: memoryview) -> int:
        """Send one GET and return the number of received bytes.

        This is less than the buffer's length if the transfer broke after _PROGRESS_BYTES or more. Raises
        UnavailableError if it broke before.
        """
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
