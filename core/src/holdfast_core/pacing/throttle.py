"""Limit in bytes per second that all threads of a process share and that may change at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.05
"""Seconds of unused rate that a burst may use. A longer burst would slow training."""


class Throttle:
    """Shared rate limit. Callers call `take` before they move bytes. Without a limit it only counts them."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._limit: float | None = None
        self._paid_until = 0.0
        self._moved = 0

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that were passed to `take` since this object was created."""
        with self._lock:
            return self._moved

    def set_limit(self, bytes_per_second: float | None) -> None:
        """Set the limit. None removes it. Calls of `take` that already wait still use the old limit."""
        with self._lock:
            self._limit = bytes_per_second

    def take(self, byte_count: int) -> None:
        """Block until `byte_count` more bytes may be moved."""
        with self._lock:
            self._moved += byte_count
            if self._limit is None:
                return
            now = self._monotonic()
            begin = max(self._paid_until, now - BURST_SECONDS)
            self._paid_until = begin + byte_count / self._limit
            wait = begin - now
        if wait > 0:
            self._sleep(wait)
