"""Clocks that tests move."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from holdfast_core.clock import SystemClock


class ManualClock:
    """Clock that moves only in `advance`. Sleepers wake in order of their deadlines."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    @property
    def sleepers(self) -> int:
        """Return the number of sleeps that `advance` has not ended yet."""
        return len(self._sleepers)

    def monotonic(self) -> float:
        return self._now

    def utc_now(self) -> datetime:
        return datetime.fromtimestamp(self._now, UTC)

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._sleepers.append((self._now + seconds, event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [s for s in self._sleepers if s[0] <= self._now]
        self._sleepers = [s for s in self._sleepers if s[0] > self._now]
        for _, event in sorted(due, key=lambda s: s[0]):
            event.set()


class SteppedClock(SystemClock):
    """Clock whose monotonic time moves only in `advance`.

    Its sleeps take their real time, so that back-offs of milliseconds end without a call. A busy machine thus
    delays a test, but does not let a limit pass.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
