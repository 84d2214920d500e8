"""A work queue of keys. A key is queued at most once, and only one worker handles it at a time.

A key that is added while a worker handles it is queued again afterwards. If the handler raises, the key
is retried after a growing, jittered delay. Keys that come first overtake all others. The queue does not
depend on Kubernetes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

from holdfast_core.clock import Clock

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 15.0


class WorkQueue(Generic[K]):
    """Work queue whose size is bounded by twice the number of distinct keys.

    Args:
        comes_first: Called when a key is added. Returns whether it overtakes the keys for which it returned
            False.
    """

    def __init__(
        self,
        clock: Clock,
        on_error: Callable[[K, Exception], None],
        jitter: random.Random,
        comes_first: Callable[[K], bool] = lambda _: True,
    ) -> None:
        self._clock = clock
        self._on_error = on_error
        self._jitter = jitter
        self._comes_first = comes_first
        self._ready: asyncio.PriorityQueue[tuple[int, int, K]] = asyncio.PriorityQueue()
        self._numbers = count()
        self._waiting: dict[K, int] = {}
        """Number of the queued entry of each key. A key that has overtaken leaves its older entry behind."""
        self._late = set[K]()
        """Waiting keys that do not come first."""
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._delayed: dict[K, tuple[float, asyncio.Task[None]]] = {}
        self._failures: dict[K, int] = {}
        self._rests_until: dict[K, float] = {}

    @property
    def depth(self) -> int:
        """Number of keys that wait for a worker. Delayed keys do not count."""
        return len(self._waiting)

    def add(self, key: K) -> None:
        """Queue the key for the next free worker. Call from the event loop's thread only."""
        if key in self._active:
            self._again.add(key)
        elif (rest := self._rests_until.get(key, 0.0) - self._clock.monotonic()) > 0:
            self.add_after(key, rest)
        elif key not in self._waiting:
            self._put(key, self._comes_first(key))
        elif key in self._late and self._comes_first(key):
            self._put(key, True)

    def _put(self, key: K, first: bool) -> None:
        (self._late.discard if first else self._late.add)(key)
        self._waiting[key] = next(self._numbers)
        # Numbers differ, so that keys are never compared.
        self._ready.put_nowait((0 if first else 1, self._waiting[key], key))

    def add_after(self, key: K, seconds: float) -> None:
        """Add the key after a delay. Of several delays of one key, only the earliest is kept."""
        if seconds <= 0:
            self.add(key)
            return
        due = self._clock.monotonic() + seconds
        known = self._delayed.get(key)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        self._delayed[key] = (due, asyncio.create_task(self._delay(key, seconds)))

    def rest(self, key: K, seconds: float) -> None:
        """Let no worker take the key again for `seconds`. Additions until then queue it once, at the end.

        Call it while a worker handles the key.
        """
        self._rests_until[key] = self._clock.monotonic() + seconds

    def forget(self, key: K) -> None:
        """Drop all that is known of the key, because its object is gone."""
        self._failures.pop(key, None)
        self._rests_until.pop(key, None)
        known = self._delayed.pop(key, None)
        if known is not None:
            known[1].cancel()

    async def run(self, workers: int, handle: Callable[[K], Awaitable[None]]) -> None:
        """Run `workers` workers until cancelled. A key whose `handle` raises is retried later."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._work(handle))
        finally:
            for _, task in self._delayed.values():
                task.cancel()
            self._delayed.clear()

    async def _work(self, handle: Callable[[K], Awaitable[None]]) -> None:
        while True:
            key = await self._take()
            try:
                await handle(key)
                self._failures.pop(key, None)
            except Exception as error:  # noqa: BLE001 - an error of one key must not stop the worker
                self._on_error(key, error)
                self.add_after(key, self._retry_delay(key))
            finally:
                self._done(key)

    async def _take(self) -> K:
        while True:
            _, number, key = await self._ready.get()
            if self._waiting.get(key) == number:
                break
        del self._waiting[key]
        self._late.discard(key)
        self._rests_until.pop(key, None)
        self._active.add(key)
        known = self._delayed.pop(key, None)
        if known is not None:
            known[1].cancel()  # the pass that begins now sets its own delay
        return key

    def _done(self, key: K) -> None:
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _retry_delay(self, key: K) -> float:
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        full = min(FIRST_RETRY_SECONDS * 2.0 ** min(count, 20), MAX_RETRY_SECONDS)
        return full * (0.5 + self._jitter.random() / 2)

    async def _delay(self, key: K, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._delayed.pop(key, None)
        self.add(key)
