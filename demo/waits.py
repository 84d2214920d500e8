"""Waits that continue while something makes progress, and the error that ends them.

The error has three lines: what happened, what is seen, and where the logs are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

STALL_SECONDS = 180.0
"""Seconds without progress after which a wait fails. Even a slow machine makes progress more often."""


class DemoFailed(Exception):
    """The demo cannot continue.

    Its text has three lines: what happened, what is seen, and where the logs are.
    """

    def __init__(self, happened: str, seen: str, logs: str) -> None:
        super().__init__(f"{happened}\nSeen: {seen}\nLogs: {logs}")


@dataclass(frozen=True, slots=True)
class Pause:
    """Clock of a wait. Tests replace it."""

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

    Raises the error that `failed` makes of a sentence, once `sign` has returned no new value for
    `stall_seconds`. Only a value that was never returned before counts as new, so that a job that restarts
    for ever counts as stalled.
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
            raise failed(
                f"It waited for {what}, and there was no progress for {stall_seconds:.0f} s."
            )
        clock.sleep(clock.between_seconds)
