"""Measurement of how long each save blocks its caller."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import holdfast

_MOST_SECONDS = 120.0


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append to `seconds` how long the block took."""
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


class TimedCheckpointer(holdfast.Checkpointer):
    """Waits before each save until the last one is durable, so that no save finds its slots busy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []
        self._last: holdfast.SaveHandle | None = None

    def save(
        self, step: int, state: Mapping[str, Any], *, is_last: bool = False
    ) -> holdfast.SaveHandle:
        self.settle()
        with timed(self.seconds):
            self._last = super().save(step, state, is_last=is_last)
        return self._last

    def settle(self) -> None:
        """Wait until the last save is durable."""
        if self._last is not None:
            self._last.wait(timeout=_MOST_SECONDS)
