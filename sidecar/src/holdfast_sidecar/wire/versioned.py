"""A version number with a long poll, by which the operator follows the coordinator's state.

An urgent change raises the version immediately. Other changes are bundled. They raise it at most once in the
time that the operator chooses, because an operator of a thousand jobs cannot follow each of them closely.
The operator can acknowledge only versions that this instance has delivered. A number from an earlier
instance, which may be higher, acknowledges nothing.
"""

from __future__ import annotations

import asyncio

BUNDLE_SECONDS = 1.0
"""Shortest time for which changes that are not urgent are bundled."""


class Versioned:
    """Version number that grows with each change and that callers can wait for."""

    def __init__(self) -> None:
        self.version = 1
        self._delivered = 0
        self._acknowledged = 0
        self._changed = asyncio.Event()
        self._ticked = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._bundle_seconds = BUNDLE_SECONDS
        self._closed = False

    def bump(self, *, urgent: bool) -> int:
        """Record a change and return the present version.

        Args:
            urgent: Raise the version now, so that the returned version includes the change. Otherwise it is
                raised within the time of `bundle_for`.
        """
        self.tick()
        if urgent:
            self._raise()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(self._bundle_seconds, self._raise)
        return self.version

    def bundle_for(self, seconds: float) -> None:
        """Bundle changes that are not urgent for this time, at least BUNDLE_SECONDS, from the next one on."""
        self._bundle_seconds = max(BUNDLE_SECONDS, seconds)

    def tick(self) -> None:
        """Wake the loops that wait in `wait_tick`, without a new version."""
        self._ticked.set()

    def close(self) -> None:
        """End all waits for a newer version."""
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
        """Record that the caller has acted on all versions up to `since`, if they were delivered."""
        if since <= self._delivered:
            self._acknowledged = max(self._acknowledged, since)
        elif since >= self.version:
            # The number is from an earlier instance. Without a version above it, the caller would wait
            # forever.
            self.version = since
            self._raise()

    def delivered(self, version: int) -> None:
        """Record that a state of this version was sent to the caller."""
        self._delivered = max(self._delivered, version)

    def acknowledged(self, version: int) -> bool:
        """Return whether the caller has acknowledged this version or a higher one."""
        return self._acknowledged >= version

    async def wait_above(self, since: int, timeout_seconds: float) -> None:
        """Wait until the version is above `since`, `close` is called, or the time is over."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.version <= since and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            return

    async def wait_tick(self, at_most_seconds: float = 60.0) -> None:
        """Wait until the next change, but no longer than `at_most_seconds`.

        A change that one waiter has consumed does not wake another one that begins to wait later, so each
        loop also looks again after this time.
        """
        waiter = self._ticked
        try:
            async with asyncio.timeout(at_most_seconds):
                await waiter.wait()
        except TimeoutError:
            return
        if self._ticked is waiter:
            self._ticked = asyncio.Event()
