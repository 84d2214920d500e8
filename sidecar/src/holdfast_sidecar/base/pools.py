"""Bounded thread pools for all calls that block: disk, bulk connections of peers, object store.

A thread cannot be cancelled. `drain` therefore also waits for calls whose awaiting task was cancelled, so
that a seal does not list the inventory while a write of the old round is still under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_COPY_THREADS = 8


class Pool:
    """Named thread pool with a record of its unfinished calls."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._running: set[Future[Any]] = set()

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `call` in a thread, and return or raise what it does.

        The call is queued before the first await. If the caller checks the round just before, without an
        await in between, then a SEAL that arrives later finds the call in `drain`. Cancelling the awaiting
        task does not cancel the call.
        """
        future = self._executor.submit(call, *args, **kwargs)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait for the calls that are running or queued now. Return False if the time ran out."""
        waiting = {asyncio.wrap_future(f) for f in tuple(self._running) if not f.cancelled()}
        if not waiting:
            return True
        done, pending = await asyncio.wait(waiting, timeout=timeout_seconds)
        for future in done:
            # The caller of `run` receives the exception. Retrieving it here prevents asyncio's warning.
            future.exception()
        return not pending

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Pools:
    """The thread pools of a sidecar, one for each kind of call that may be slow.

    Calls of one kind do not delay those of another: a store that hangs does not delay a local commit.

    * `shard`: write and delete shards on the node tier.
    * `digest`: digest slots in memory, while the disk may occupy `shard`.
    * `meta`: write the round file, manifests and layouts. They are small, and a seal must not wait for
      them behind gigabytes of shards.
    * `read`: read the index and small documents of the node tier.
    * `fill`: read shards from the node tier, and write slots.
    * `copy`: copy the shards of other members to the node tier. There are more threads than members whose
      copies ROUND usually assigns to one worker, so that a member that stalls delays only its own copies.
    * `fetch`: read what ranks wait for, from peers and from the store.
    * `store`: upload, and clean up the store.
    * `scrub`: read the node tier again, slowly.
    """

    def __init__(self, *, disk: int, fetch: int, store: int) -> None:
        self.shard = Pool("shard", disk)
        self.digest = Pool("digest", disk)
        self.meta = Pool("meta", 1)
        self.read = Pool("read", disk)
        self.fill = Pool("fill", disk)
        self.copy = Pool("copy", _COPY_THREADS)
        self.fetch = Pool("fetch", fetch)
        self.store = Pool("store", store)
        self.scrub = Pool("scrub", 1)

    async def drain_writes(self, timeout_seconds: float) -> bool:
        """Wait for the calls of `shard` and `meta`, which make the writes that a round fences.

        Return False if the time ran out.
        """
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
