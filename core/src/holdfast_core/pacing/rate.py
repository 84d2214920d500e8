"""How fast bytes may move in the background without slowing the trainer down. Pure.

Each step of the trainer is an observation: how long it took, and how many bytes moved meanwhile.
Steps without bytes tell what a step costs. Where steps with bytes cost more, the rate falls, but never
below what keeps checkpoints from falling behind; where they do not, it rises until there is no limit.
"""

from __future__ import annotations

from collections import deque
from statistics import median

TOLERATED_SLOWDOWN = 0.03
"""Share of a step; below it noise decides."""
SLOWER, FASTER = 0.7, 1.25
OBSERVATIONS = 5
"""Steps of a kind before anything is concluded from their median."""
NO_LIMIT_ABOVE = 4.0
"""Times the rate that was seen without a limit: then the limit is none."""


class Pace:
    """The rate of one pod. Not thread-safe."""

    def __init__(self) -> None:
        self.limit: float | None = None
        """Bytes a second; None: as fast as it goes."""
        self.floor = 0.0
        """Bytes a second that checkpoints need to be done before the next one."""
        self._quiet: deque[float] = deque(maxlen=32)
        self._busy: list[tuple[float, int]] = []
        self._unlimited = 0.0

    @property
    def quiet_step_seconds(self) -> float | None:
        """What a step costs while nothing moves; None: not known yet."""
        return median(self._quiet) if len(self._quiet) >= OBSERVATIONS else None

    def step(self, seconds: float, moved_bytes: int) -> None:
        """A step took `seconds`, during which `moved_bytes` were moved. Sets `limit`."""
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
