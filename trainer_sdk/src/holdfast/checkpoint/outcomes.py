"""Outcomes of the saves that were handed over: failures to count, and commits to watch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from holdfast.base.handle import SaveHandle
from holdfast.checkpoint.watch import StallCounter

_MAX_DURABLE = 64
"""Durable saves whose upload is still watched. An upload waits behind at most two others."""


class Outcomes:
    """Handles of saves whose outcome has not been counted yet.

    Only the training thread uses it. Other threads settle the handles.
    """

    def __init__(self) -> None:
        self.watch = StallCounter()
        self._handles: list[SaveHandle] = []
        self._durable: deque[SaveHandle] = deque(maxlen=_MAX_DURABLE)

    def add(self, handle: SaveHandle) -> None:
        self._handles.append(handle)

    def next_failed(self, now: float) -> SaveHandle | None:
        """Return the next save that failed after it was handed over, or None.

        Each failed save is returned once. A save that a newer one replaced does not count as failed. One
        that is durable counts as failed when another run has taken the store before its upload.

        Args:
            now: Monotonic seconds.
        """
        for handle in tuple(self._handles):
            if not handle.settled:
                continue
            self._handles.remove(handle)
            if handle.durable:
                self.watch.committed(handle.step, now)
                self._durable.append(handle)
            elif not handle.overtaken:
                return handle
        for handle in tuple(self._durable):
            if handle.lost_its_store:
                self._durable.remove(handle)
                return handle
        return None

    def take_unfinished(self, is_safe: Callable[[SaveHandle], bool]) -> list[SaveHandle]:
        """Remove all handles and return those that are neither settled nor safe.

        Args:
            is_safe: Whether another process will finish this save after the connection has ended.
        """
        unfinished = [h for h in self._handles if not h.settled and not is_safe(h)]
        self._handles = []
        return unfinished
