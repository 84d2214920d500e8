"""The only module that reads a clock: monotonic for durations, UTC for time stamps that people read.

No decision about order uses a wall clock (docs/guarantees.md R30).
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Source of time that is injected, so that tests can replace it."""

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary point. The value never decreases."""
        ...

    def utc_now(self) -> datetime:
        """Return the time-zone-aware UTC time. Use it for time stamps only."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def utc_now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def stamp(moment: datetime) -> str:
    """Format `moment` as RFC 3339 in UTC with whole seconds, as Kubernetes does."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_stamp(text: str) -> datetime:
    """Return an RFC 3339 time stamp as an aware datetime in UTC. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise ValueError(f"time stamp {text!r} is not RFC 3339: {error}") from error
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
