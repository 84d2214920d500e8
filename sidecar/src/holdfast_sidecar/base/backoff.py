"""Waiting between tries: exponential, with full jitter, so that a gang does not retry in step."""

from __future__ import annotations

import random

from holdfast_core.clock import Clock


class Backoff:
    def __init__(self, first_seconds: float, last_seconds: float) -> None:
        self._first = first_seconds
        self._last = last_seconds
        self._next = first_seconds

    def next_seconds(self) -> float:
        """The next pause: between a half and the whole of a bound that doubles."""
        bound = self._next
        self._next = min(bound * 2, self._last)
        return bound * (0.5 + random.random() / 2)

    def reset(self) -> None:
        self._next = self._first


class Patience:
    """Of one thing that is tried until it comes: pauses between the tries, and when they have lasted
    so long that somebody should hear of it."""

    def __init__(self, clock: Clock, backoff: Backoff, seconds: float) -> None:
        self._clock = clock
        self._backoff = backoff
        self._end = clock.monotonic() + seconds

    @property
    def over(self) -> bool:
        return self._clock.monotonic() >= self._end

    def next_seconds(self) -> float:
        return self._backoff.next_seconds()

    async def pause(self) -> None:
        await self._clock.sleep(self.next_seconds())
