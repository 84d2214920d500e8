"""Polling with a deadline, because tests never sleep for a fixed time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.hang import HANG_SECONDS

from holdfast_core.clock import SystemClock

DEADLINE_SECONDS = HANG_SECONDS


async def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Poll until `condition` is true and return its value.

    Raises AssertionError that names `what` after `seconds`.
    """
    clock = SystemClock()
    deadline = clock.monotonic() + seconds
    while not (value := condition()):
        if clock.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        await clock.sleep(0.02)
    return value
