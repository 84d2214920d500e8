"""Renewal of the lease in a thread of its own.

A pass that takes long holds the operator's event loop. If the renewal waited for it, other processes would
take the lease, and the recovery of every job would begin again in another process. A process whose event loop
stands still for good keeps the lease until the kubelet's liveness probe, which that loop answers, fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from holdfast_operator.kube.api import KubeApi
from holdfast_operator.kube.leadership import Leadership


class LeaseThread:
    """A part in the election that runs in its own thread, with its own event loop.

    Args:
        leadership: The election. Only this thread calls `run` and `release` of it.
        api: The session of `leadership`. The thread opens and closes it.
    """

    def __init__(self, leadership: Leadership, api: KubeApi) -> None:
        self._leadership = leadership
        self._api = api
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ended: asyncio.Future[BaseException | None] | None = None
        self.gained = asyncio.Event()
        """Set in the caller's event loop when this process has taken the lease. It stays set."""

    @property
    def leads(self) -> bool:
        """Whether this process may write now. Every thread may ask."""
        return self._leadership.leads

    async def run(self) -> None:
        """Take the lease and renew it until the process ends. Raises LeaseLostError if another one took it.

        A cancelled call leaves the thread running: `release` ends it.
        """
        here = asyncio.get_running_loop()
        self._ended = here.create_future()
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._run, args=(self._loop, here), name="lease", daemon=True
        ).start()
        error = await asyncio.shield(self._ended)
        if error is not None:
            raise error

    async def release(self) -> None:
        """Stop writing, give the lease back, and end the thread. Without a call of `run`, do nothing."""
        if self._loop is None or self._ended is None:
            return
        with contextlib.suppress(RuntimeError):  # the thread has ended and has closed its loop
            self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.shield(self._ended)

    def _run(self, loop: asyncio.AbstractEventLoop, caller: asyncio.AbstractEventLoop) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._take_part(caller))
        except BaseException as failure:  # noqa: BLE001 - `run` raises it in the caller's loop
            error = failure
        with contextlib.suppress(RuntimeError):  # the process ends, and its loop is closed
            caller.call_soon_threadsafe(self._report, error)

    def _report(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    async def _take_part(self, caller: asyncio.AbstractEventLoop) -> None:
        await self._api.start()
        election = asyncio.create_task(self._leadership.run())
        others = [
            asyncio.create_task(self._announce(caller)),
            asyncio.create_task(self._stop.wait()),
        ]
        try:
            await asyncio.wait((election, others[1]), return_when=asyncio.FIRST_COMPLETED)
            if election.done():
                await election
        finally:
            for task in (election, *others):
                task.cancel()
            await asyncio.gather(election, *others, return_exceptions=True)
            await self._leadership.release()
            await self._api.close()

    async def _announce(self, caller: asyncio.AbstractEventLoop) -> None:
        await self._leadership.gained.wait()
        caller.call_soon_threadsafe(self.gained.set)
