"""How slow a peer may be: a reply that only ever drips ends, however short its silences are.

Knows sockets, not HTTP. A time-out of the socket bounds one silence; this bounds the sum.
"""

from __future__ import annotations

import io
import socket
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import UnavailableError

SLOWEST_BYTES_PER_SECOND = 64 << 10


@dataclass(slots=True)
class Pace:
    """Of one reply: `grace_seconds`, and a second more for every 64 KiB of it."""

    what: str
    """For messages: which reply of whom."""
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


class PacedSocket:
    """A connected socket as http.client.HTTPResponse reads it."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock = sock
        self._pace = pace

    def makefile(self, mode: str) -> io.BufferedReader:
        if mode != "rb":
            raise ValueError(f"mode {mode!r}, expected 'rb'")
        return io.BufferedReader(_PacedReader(self._sock, self._pace))


class _PacedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock = sock
        self._pace = pace
        self._idle_seconds = sock.gettimeout()
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # any buffer
        left, idle = self._pace.left_seconds(), self._idle_seconds
        # Two system calls saved a read: the end of the pace is nearly always further away.
        hurried = idle is None or left < idle
        try:
            if hurried:
                self._sock.settimeout(left)
            count = self._raw.readinto(buffer)
        except TimeoutError:
            if hurried:
                self._pace.left_seconds()
            raise
        finally:
            if hurried:
                self._sock.settimeout(idle)
        self._pace.received_bytes += count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
