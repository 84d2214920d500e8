"""A level with a version and a long poll: how the operator follows the coordinator.

Changes are bundled: urgent ones raise the version at once, others at most once a second. The caller
acknowledges only versions that this life has delivered: what it says of an earlier life (whose
numbers may be higher) acknowledges nothing.
"""

from __future__ import annotations

import asyncio

_BUNDLE_SECONDS = 1.0


class Versioned:
    def __init__(self) -> None:
        self.version = 1
        self._delivered = 0
        self._acknowledged = 0
        self._changed = asyncio.Event()
        self._ticked = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._closed = False

    def bump(self, *, urgent: bool) -> int:
        """Something changed; returns the version that will show it."""
        self.tick()
        if urgent:
            self._raise()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(_BUNDLE_SECONDS, self._raise)
        return self.version

    def tick(self) -> None:
        """Wake the loops that look at the state, without a new version."""
        self._ticked.set()

    def close(self) -> None:
        """Answer everybody who waits."""
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        self._changed.set()

    def _raise(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def acknowledge(self, since: int) -> None:
        if since <= self._delivered:
            self._acknowledged = max(self._acknowledged, since)
        elif since >= self.version:
            # The caller knows a higher number from an earlier life: go above it, or it would
            # wait for ever.
            self.version = since
            self._raise()

    def delivered(self, version: int) -> None:
        self._delivered = max(self._delivered, version)

    def acknowledged(self, version: int) -> bool:
        return self._acknowledged >= version

    async def wait_above(self, since: int, timeout_seconds: float) -> None:
        """Until the version is above `since`, the time is over, or this life ends."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.version <= since and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            return

    async def wait_tick(self, at_most_seconds: float = 60.0) -> None:
        """Until something changed; one waiter may miss what another one consumed, so each loop
        also looks again after `at_most_seconds`."""
        waiter = self._ticked
        try:
            async with asyncio.timeout(at_most_seconds):
                await waiter.wait()
        except TimeoutError:
            return
        if self._ticked is waiter:
            self._ticked = asyncio.Event()
