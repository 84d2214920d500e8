"""Bounded threads for everything that blocks: disk, peers' bulk connections, the object store.

A thread cannot be cancelled. `drain` therefore waits for calls whose awaiting task is gone, so that
a seal never lists an inventory while a write of the old round is still on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """A named executor that knows what is still running in it."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: set[Future[Any]] = set()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call is queued before this first gives up control: a check made just before it
        still holds when a later `drain` looks."""
        future = self._executor.submit(call, *args, **kwargs)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait for the calls that run or wait now; False if the time ran out."""
        waiting = {asyncio.wrap_future(f) for f in tuple(self._running) if not f.cancelled()}
        if not waiting:
            return True
        done, pending = await asyncio.wait(waiting, timeout=timeout_seconds)
        for future in done:
            future.exception()  # whoever awaited the call has it; this look is only for asyncio
        return not pending

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Pools:
    """One pool for each kind of slowness, so that a hung store never holds up a local commit.

    `shard` writes and deletes shards; `digest` reads what waits in memory, while `shard` is held up by
    the disk; `meta` writes the round file, manifests and layouts (small: a
    seal must not wait behind gigabytes for them); `read` only looks at the disk, `fill` reads
    shards from it; `copy` sends to peers; `fetch` brings back what ranks wait for, from peers and
    store; `store` uploads; `scrub` reads again what lies on the disk, slowly.
    """

    def __init__(self, *, disk: int, copy: int, store: int) -> None:
        self.shard = Pool("shard", disk)
        self.digest = Pool("digest", disk)
        self.meta = Pool("meta", 1)
        self.read = Pool("read", disk)
        self.fill = Pool("fill", disk)
        self.copy = Pool("copy", copy)
        self.fetch = Pool("fetch", copy)
        self.store = Pool("store", store)
        self.scrub = Pool("scrub", 1)

    async def drain_writes(self, timeout_seconds: float) -> bool:
        """No fenced write is on its way when this is True."""
        results = await asyncio.gather(
            self.shard.drain(timeout_seconds), self.meta.drain(timeout_seconds)
        )
        return all(results)

    def close(self) -> None:
        for pool in (
            self.shard,
            self.digest,
            self.meta,
            self.read,
            self.fill,
            self.copy,
            self.fetch,
            self.store,
            self.scrub,
        ):
            pool.close()
