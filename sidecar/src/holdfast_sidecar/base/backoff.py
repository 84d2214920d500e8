"""Pauses between retries: exponential back-off with jitter, so that a gang does not retry in step."""

from __future__ import annotations

import random

from holdfast_core.clock import Clock


class Backoff:
    """Back-off of one repeated action. The bound of the pauses doubles up to `last_seconds`."""

    def __init__(self, first_seconds: float, last_seconds: float) -> None:
        self._first = first_seconds
        self._last = last_seconds
        self._next = first_seconds

    def next_seconds(self) -> float:
        """Return the next pause: a random time between half of the bound and the bound."""
        bound = self._next
        self._next = min(bound * 2, self._last)
        return bound * (0.5 + random.random() / 2)

    def reset(self) -> None:
        self._next = self._first


class Patience:
    """Pauses of one action that is retried until it succeeds, with the time after which to report it."""

    def __init__(self, clock: Clock, backoff: Backoff, seconds: float) -> None:
        self._clock = clock
        self._backoff = backoff
        self._end = clock.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the retries have lasted long enough to be reported. They may continue."""
        return self._clock.monotonic() >= self._end

    def next_seconds(self) -> float:
        return self._backoff.next_seconds()

    async def pause(self) -> None:
        await self._clock.sleep(self.next_seconds())
