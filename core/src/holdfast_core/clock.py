"""The only place that reads a clock. Monotonic for durations, UTC for stamps that people read.

No decision of order uses a wall clock (docs/guarantees.md R30).
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Injected wherever time matters, so that tests advance it by hand."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back."""
        ...

    def utc_now(self) -> datetime:
        """Aware UTC time, for stamps only."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def utc_now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when a test says so; sleepers wake in order of their deadlines."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, asyncio.Event]] = []

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


def stamp(moment: datetime) -> str:
    """RFC 3339 with seconds, as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
