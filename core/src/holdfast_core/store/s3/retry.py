"""The one place that tries again: full jitter, a limit of attempts and a budget of time.

Reads `retryable` from the class of the error and nothing else. It never decides whether a repeated
operation is safe: what it is given must be idempotent (an operation whose outcome may be unknown
looks first at what is there). Blocks the calling thread; knows no tier and no protocol.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.errors import HoldfastError, UnavailableError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long one operation is tried.

    The wait before attempt n+1 is uniform in [0, min(cap, base * 2**(n-1))]: many sidecars that
    failed together do not come back together.
    """

    max_attempts: int = 8
    budget_seconds: float = 120.0
    """No new attempt begins later than this after the first one began."""
    base_seconds: float = 0.2
    cap_seconds: float = 20.0

    def ceiling_seconds(self, failures: int) -> float:
        """The longest wait after `failures` (>= 1) failed attempts."""
        # The exponent is bounded so that a huge max_attempts cannot overflow a float.
        return min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))


@dataclass(frozen=True, slots=True)
class Retrier:
    """Runs an operation under a policy. Safe for use by many threads.

    `stop` ends all waits at once: after it is set, the last error is raised and nothing is tried
    again.
    """

    policy: RetryPolicy = RetryPolicy()
    clock: Clock = field(default_factory=SystemClock)
    uniform: Callable[[float, float], float] = random.uniform
    sleep: Callable[[float], object] | None = None
    """Seconds; None waits on `stop`."""
    stop: threading.Event = field(default_factory=threading.Event)

    def call(self, what: str, operation: Callable[[], T]) -> T:
        """The result of `operation`, tried until it works, fails for good, or the policy is spent.

        Raises what the operation raised when its class is not retryable; otherwise
        UnavailableError with the last error's words, the number of attempts and the seconds spent.
        """
        began = self.clock.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                return operation()
            except HoldfastError as error:
                if not error.retryable:
                    raise
                spent = self.clock.monotonic() - began
                wait = self.uniform(0.0, self.policy.ceiling_seconds(attempt))
                if (
                    self.stop.is_set()
                    or attempt >= self.policy.max_attempts
                    or spent + wait > self.policy.budget_seconds
                ):
                    raise UnavailableError(
                        f"{what}: given up after {attempt} attempt(s) in {spent:.1f} s: {error}"
                    ) from error
            self._pause(wait)

    def look(self, what: str, operation: Callable[[], T | None], looks: int = 3) -> T | None:
        """The same for something that should be there: None only when `looks` looks in a row, with
        the policy's waits, did not find it. A store may say 404 to what was just written."""
        left = looks

        def once() -> T | None:
            nonlocal left
            found = operation()
            left -= 1
            if found is None and left > 0:
                raise UnavailableError(f"{what}: not there at {looks - left} look(s)")
            return found

        return self.call(what, once)

    def _pause(self, seconds: float) -> None:
        if self.sleep is None:
            self.stop.wait(seconds)
        else:
            self.sleep(seconds)
