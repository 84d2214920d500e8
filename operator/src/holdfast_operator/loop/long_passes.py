"""Decisions that take long run in a thread, so that the event loop serves other jobs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from holdfast_core.clock import Clock
from holdfast_operator.model.keys import Key

T = TypeVar("T")

YIELD_SECONDS = 0.1
"""Duration of a decision after which the next one about the same job runs in a thread."""


class LongPasses:
    """The jobs whose last decision took YIELD_SECONDS or longer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._long = set[Key]()

    async def decide(self, key: Key, decide: Callable[[], T]) -> T:
        """Return what `decide` returns. It must be pure: it may run in another thread.

        A decision that takes longer than usual for the first time holds the event loop once.
        """
        begun = self._clock.monotonic()
        result = await asyncio.to_thread(decide) if key in self._long else decide()
        if self._clock.monotonic() - begun >= YIELD_SECONDS:
            self._long.add(key)
        else:
            self._long.discard(key)
        return result

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is gone."""
        self._long.discard(key)
