"""Minimum rate of a remote peer's answer.

The socket's time-out bounds one pause only. Without a minimum rate, a peer that sends a byte before each
time-out could hold a caller forever.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import UnavailableError

SLOWEST_BYTES_PER_SECOND = 64 << 10
"""Minimum rate, after the grace period."""


@dataclass(slots=True)
class MinimumRate:
    """Deadline of one answer: `grace_seconds`, and one more second for each 64 KiB received."""

    what: str
    """The answer and its sender, for error texts."""
    clock: Clock
    began: float
    """Monotonic time at which the answer began."""
    grace_seconds: float
    received_bytes: int = 0

    def left_seconds(self) -> float:
        """Return the seconds until more bytes must have arrived. Raises UnavailableError if none are left."""
        spent = self.clock.monotonic() - self.began
        left = self.grace_seconds + self.received_bytes / SLOWEST_BYTES_PER_SECOND - spent
        if left <= 0:
            raise UnavailableError(
                f"{self.what}: only {self.received_bytes} bytes in {spent:.1f} s"
            )
        return left

    def receive(
        self,
        sock: socket.socket,
        idle_seconds: float | None,
        read: Callable[[memoryview], int | None],
        buffer: memoryview,
    ) -> int | None:
        """Call `read` once, with a time-out on `sock` that respects the deadline.

        Args:
            idle_seconds: The time-out that `sock` has before the call and has again afterwards.
            read: Reads from `sock` into the buffer and returns the number of bytes.

        Raises:
            UnavailableError: The deadline has passed.
            Exception: What `read` raises.
        """
        left = self.left_seconds()
        # The deadline is nearly always further away than the idle time-out. Then the time-out need not be
        # changed, which saves two system calls for each read.
        hurried = idle_seconds is None or left < idle_seconds
        try:
            if hurried:
                sock.settimeout(left)
            count = read(buffer)
        except TimeoutError:
            if hurried:
                self.left_seconds()
            raise
        finally:
            if hurried:
                sock.settimeout(idle_seconds)
        self.received_bytes += count or 0
        return count


class RatedSocket:
    """A connected socket with the one method that http.client.HTTPResponse uses, `makefile`."""

    def __init__(self, sock: socket.socket, rate: MinimumRate) -> None:
        self._sock = sock
        self._rate = rate

    def makefile(self, mode: str) -> io.BufferedReader:
        if mode != "rb":
            raise ValueError(f"mode {mode!r}, expected 'rb'")
        return io.BufferedReader(_RatedReader(self._sock, self._rate))


class _RatedReader(io.RawIOBase):
    """Raw reader of a socket whose reads are bounded by a MinimumRate."""

    def __init__(self, sock: socket.socket, rate: MinimumRate) -> None:
        self._sock = sock
        self._rate = rate
        self._idle_seconds = sock.gettimeout()
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # takes any buffer
        return self._rate.receive(self._sock, self._idle_seconds, self._raw.readinto, buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
