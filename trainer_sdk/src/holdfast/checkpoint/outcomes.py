"""Outcomes of the saves that were handed over: failures to count, and commits to watch."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.base.handle import SaveHandle
from holdfast.checkpoint.watch import CommitWatch


class Outcomes:
    """Handles of saves whose outcome has not been counted yet.

    Only the training thread uses it. Other threads settle the handles.
    """

    def __init__(self) -> None:
        self.watch = CommitWatch()
        self._handles: list[SaveHandle] = []

    def add(self, handle: SaveHandle) -> None:
        self._handles.append(handle)

    def next_failed(self, now: float) -> SaveHandle | None:
        """Return the next save that failed after it was handed over, or None.

        Each failed save is returned once. A save that a newer one replaced does not count as failed.

        Args:
            now: Monotonic seconds.
        """
        for handle in tuple(self._handles):
            if not handle.settled:
                continue
            self._handles.remove(handle)
            if handle.durable:
                self.watch.committed(handle.step, now)
            elif not handle.overtaken:
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
