"""What became of the saves that were handed over: failures to count, and commits to watch."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.base.handle import SaveHandle
from holdfast.checkpoint.watch import CommitWatch


class Outcomes:
    """The training thread's alone; the handles are settled by others meanwhile."""

    def __init__(self) -> None:
        self.watch = CommitWatch()
        self._handles: list[SaveHandle] = []

    def add(self, handle: SaveHandle) -> None:
        self._handles.append(handle)

    def next_failed(self, now: float) -> SaveHandle | None:
        """A save that failed after it was handed over, each once. Saves that were overtaken by a newer
        one have not failed."""
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
        """At the end: saves that are neither settled nor safe with someone who finishes them."""
        unfinished = [h for h in self._handles if not h.settled and not is_safe(h)]
        self._handles = []
        return unfinished
