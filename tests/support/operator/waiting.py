"""Waiting in tests that drive real processes: polls with a deadline instead of fixed sleeps."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any


def poll(what: str, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Return the first true value of `condition`.

    Raises AssertionError that names `what` after `seconds`.
    """
    pause = Event()
    value: Any = None
    for _ in range(int(seconds / 0.05)):
        value = condition()
        if value:
            return value
        pause.wait(0.05)
    raise AssertionError(f"{what}: not within {seconds} s; the last value was {value!r}")
