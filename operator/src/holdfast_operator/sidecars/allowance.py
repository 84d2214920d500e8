"""How often something may happen: a burst at once, and a steady rate after it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """`burst` uses at once; each comes back after `seconds_each`."""

    burst: int
    seconds_each: float
    used_until: float = 0.0
    """Monotonic: when all that was used has come back."""

    def wait_seconds(self, now: float) -> float:
        """Use one. Returns how long to wait before."""
        self.used_until = max(self.used_until, now) + self.seconds_each
        return max(0.0, self.used_until - now - self.burst * self.seconds_each)
