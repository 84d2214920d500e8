"""How slow a peer may be: an answer that only ever drips ends, however short its silences are.

A time-out of the socket bounds one silence; this bounds the sum.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import UnavailableError

SLOWEST_BYTES_PER_SECOND = 64 << 10


@dataclass(slots=True)
class Pace:
    """Of one answer: `grace_seconds`, and a second more for every 64 KiB of it."""

    what: str
    """For messages: which answer of whom."""
    clock: Clock
    began: float
    grace_seconds: float
    received_bytes: int = 0

    def left_seconds(self) -> float:
        """Until more must have come. Raises UnavailableError when that time is over."""
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
        """One `read` from `sock`, whose time-out is `idle_seconds` before and after. Raises
        UnavailableError at the end of the pace, and what `read` raises."""
        left = self.left_seconds()
        # Two system calls saved a read: the end of the pace is nearly always further away.
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
