"""Retries with full jitter, a limit of attempts and a time budget. All retries of the store are made here.

Only the `retryable` attribute of an error's class decides whether an operation is tried again. Operations
must be idempotent: one whose outcome may be unknown must first look at what is stored. The calling
thread is blocked.
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

    The wait before attempt n+1 is uniform in [0, min(cap, base * 2**(n-1))], so that many sidecars that
    failed together do not retry together.
    """

    max_attempts: int = 8
    budget_seconds: float = 120.0
    """No attempt begins later than this after the first attempt began."""
    base_seconds: float = 0.2
    cap_seconds: float = 20.0

    def ceiling_seconds(self, failures: int) -> float:
        """Return the longest wait after `failures` (>= 1) failed attempts."""
        # The exponent is bounded so that a huge max_attempts cannot overflow a float.
        return min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))


@dataclass(frozen=True, slots=True)
class Retrier:
    """Runner of operations under a retry policy. Safe for use by many threads."""

    policy: RetryPolicy = RetryPolicy()
    clock: Clock = field(default_factory=SystemClock)
    uniform: Callable[[float, float], float] = random.uniform
    sleep: Callable[[float], object] | None = None
    """Waits for the given seconds; None waits on `stop`."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends all waits when it is set. A waiting operation then makes one last attempt immediately."""

    def call(self, what: str, operation: Callable[[], T]) -> T:
        """Return the result of `operation`. Repeat it while it raises retryable errors.

        Args:
            what: The operation, for the error message.
            operation: Must be idempotent.

        Raises:
            HoldfastError: The operation raised an error that is not retryable.
            UnavailableError: The policy is spent or `stop` is set. The message has the last error, the
                number of attempts and the seconds spent.
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
        """Like `call`, for an operation that returns None if it does not find something.

        Returns None only after `looks` looks in a row, with the policy's waits, found nothing, because a
        store may reply 404 for an object that was just written.
        """
        left = looks

        def once() -> T | None:
            nonlocal left
            found = operation()
            left -= 1
            if found is None and left > 0:
                raise UnavailableError(f"{what}: no such object at {looks - left} look(s)")
            return found

        return self.call(what, once)

    def _pause(self, seconds: float) -> None:
        if self.sleep is None:
            self.stop.wait(seconds)
        else:
            self.sleep(seconds)
