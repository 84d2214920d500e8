"""Waits that last as long as something moves, and the three lines that end one when nothing does."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

STALL_SECONDS = 180.0
"""Without any change for so long a wait ends. A slow machine changes something more often."""


class DemoFailed(Exception):
    """The story cannot go on. Its text is three lines: what happened, what is seen, where the logs are."""

    def __init__(self, happened: str, seen: str, logs: str) -> None:
        super().__init__(f"{happened}\nSeen: {seen}\nLogs: {logs}")


@dataclass(frozen=True, slots=True)
class Pause:
    """The clock of a wait; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    between_seconds: float = 0.25


def wait_while_moving(
    what: str,
    done: Callable[[], T | None],
    sign: Callable[[], Hashable],
    failed: Callable[[str], DemoFailed],
    *,
    pause: Pause | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> T:
    """Return the first true value of `done`.

    Raises what `failed` makes of a sentence, once `sign` has shown nothing new for `stall_seconds`.
    A sign that was seen before is nothing new: a job that restarts for ever stands still.
    """
    clock = pause or Pause()
    known: set[Hashable] = set()
    moved_at = clock.monotonic()
    while True:
        found = done()
        if found:
            return found
        now, shown = clock.monotonic(), sign()
        if shown not in known:
            known.add(shown)
            moved_at = now
        elif now - moved_at >= stall_seconds:
            raise failed(f"It waited for {what}, and nothing moved for {stall_seconds:.0f} s.")
        clock.sleep(clock.between_seconds)
