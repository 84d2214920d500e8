"""Compute the rate at which background transfers do not slow training. No I/O.

Each step is an observation: its duration and the bytes that were moved during it. Quiet steps, during
which nothing was moved, show how long a step takes. If the other steps take longer, the rate falls, but
never below the rate that checkpoints need. If they do not, it rises until there is no limit.
"""

from __future__ import annotations

from collections import deque
from statistics import median

TOLERATED_SLOWDOWN = 0.03
"""Accepted slowdown, as a share of a quiet step. Smaller differences are noise."""
SLOWER, FASTER = 0.7, 1.25
"""Factors by which the limit falls and rises."""
OBSERVATIONS = 5
"""Number of quiet steps, and of busy steps, that a median needs."""
NO_LIMIT_ABOVE = 4.0
"""The limit is removed when it exceeds this many times the highest rate measured without a limit."""


class Pace:
    """Rate limit of one pod. Not thread-safe."""

    def __init__(self) -> None:
        self.limit: float | None = None
        """Bytes per second. None means no limit."""
        self.floor = 0.0
        """Lowest limit in bytes per second: what checkpoints need to be finished before the next one."""
        self._quiet: deque[float] = deque(maxlen=32)
        self._busy: list[tuple[float, int]] = []
        self._unlimited = 0.0

    @property
    def quiet_step_seconds(self) -> float | None:
        """Return the median duration of quiet steps. None until there are enough of them."""
        return median(self._quiet) if len(self._quiet) >= OBSERVATIONS else None

    def step(self, seconds: float, moved_bytes: int) -> None:
        """Record a step of `seconds` during which `moved_bytes` were moved, and set `limit`."""
        if moved_bytes == 0:
            self._quiet.append(seconds)
            return
        self._busy.append((seconds, moved_bytes))
        quiet = self.quiet_step_seconds
        if len(self._busy) < OBSERVATIONS or quiet is None:
            self._busy = self._busy[-OBSERVATIONS:]
            return
        slow = median(s for s, _ in self._busy) > quiet * (1 + TOLERATED_SLOWDOWN)
        rate = sum(b for _, b in self._busy) / max(1e-9, sum(s for s, _ in self._busy))
        self._busy = []
        self.limit = self._next(slow, rate)

    def _next(self, slow: bool, rate: float) -> float | None:
        if self.limit is None:
            self._unlimited = max(self._unlimited, rate)
        if slow:
            now = rate if self.limit is None else min(rate, self.limit)
            return max(self.floor, now * SLOWER)
        if self.limit is None:
            return None
        risen = max(self.floor, self.limit * FASTER)
        return None if risen > NO_LIMIT_ABOVE * self._unlimited else risen
