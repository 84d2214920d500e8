"""A rate limit that allows a burst and then a steady rate. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """Rate limit: `burst` uses without a wait, and one more every `seconds_each` seconds."""

    burst: int
    seconds_each: float
    used_until: float = 0.0
    """Monotonic time at which the whole burst is available again."""

    def try_use(self, now: float) -> bool:
        """Take one use if it is available without a wait. Return whether it was."""
        used_until = max(self.used_until, now) + self.seconds_each
        if used_until - now > (self.burst + 0.5) * self.seconds_each:  # 0.5: sums are rounded
            return False
        self.used_until = used_until
        return True

    def wait_seconds(self, now: float) -> float:
        """Take one use and return the seconds that the caller must wait before it."""
        self.used_until = max(self.used_until, now) + self.seconds_each
        return max(0.0, self.used_until - now - self.burst * self.seconds_each)
