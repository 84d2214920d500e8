"""Waiting in tests that drive real processes: polls with a deadline instead of fixed sleeps."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

from tests.support.hang import HANG_SECONDS

from holdfast_core.clock import SystemClock


def poll(what: str, condition: Callable[[], Any], seconds: float = HANG_SECONDS) -> Any:
    """Return the first true value of `condition`.

    Raises AssertionError that names `what` after `seconds`.
    """
    clock, pause = SystemClock(), Event()
    deadline = clock.monotonic() + seconds
    while not (value := condition()):
        if clock.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s; the last value was {value!r}")
        pause.wait(0.05)
    return value
