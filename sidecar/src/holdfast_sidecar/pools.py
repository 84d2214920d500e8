"""Bounded threads for everything that blocks: disk, peers' bulk connections, the object store.

A thread cannot be cancelled. `drain` therefore waits for calls whose awaiting task is gone, so that
a seal never lists an inventory while a write of the old round is still on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """A named executor that knows what is still running in it."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: set[Future[object]] = set()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future = self._executor.submit(call, *args, **kwargs)
        kept: Future[object] = future  # type: ignore[assignment]  # only waited for
        self._running.add(kept)
        future.add_done_callback(lambda _: self._running.discard(kept))
        return await asyncio.shield(asyncio.wrap_future(future))

    @property
    def busy(self) -> bool:
        return bool(self._running)

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait for the calls that run or wait now; False if the time ran out."""
        waiting = {asyncio.wrap_future(f) for f in tuple(self._running) if not f.cancelled()}
        if not waiting:
            return True
        _, pending = await asyncio.wait(waiting, timeout=timeout_seconds)
        return not pending

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Pools:
    """One pool for each kind of slowness, so that a hung store never holds up a local commit.

    `write` runs what fences guard (shards, manifests, the round file); `read` everything that only
    looks at the disk; `copy` and `store` talk to peers and to the object store.
    """

    def __init__(self, *, disk: int, copy: int, store: int) -> None:
        self.write = Pool("write", disk)
        self.read = Pool("read", disk)
        self.copy = Pool("copy", copy)
        self.store = Pool("store", store)

    def close(self) -> None:
        for pool in (self.write, self.read, self.copy, self.store):
            pool.close()
