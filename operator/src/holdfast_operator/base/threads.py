"""A coroutine in a thread of its own, with its own event loop, which no long pass holds up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class LoopThread:
    """A daemon thread that runs one coroutine: it does not keep the process alive.

    Call all methods in the event loop that has called `start`.

    Args:
        work: The coroutine's function. Its argument is set when the coroutine is to end.
    """

    def __init__(
        self, name: str, work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    ) -> None:
        self._name = name
        self._work = work
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ended: asyncio.Future[BaseException | None] | None = None

    def start(self) -> None:
        caller = asyncio.get_running_loop()
        self._ended = caller.create_future()
        threading.Thread(target=self._run, args=(caller,), name=self._name, daemon=True).start()

    async def ended(self) -> BaseException | None:
        """Wait for the end of the coroutine, and return its error. Return None if it was never started."""
        return None if self._ended is None else await asyncio.shield(self._ended)

    def stop(self) -> None:
        """Request the end of the coroutine, which may have ended already."""
        with contextlib.suppress(RuntimeError):  # its event loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)

    def _run(self, caller: asyncio.AbstractEventLoop) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._work(self._stop))
        except BaseException as failure:  # noqa: BLE001 - `ended` returns it in the caller's loop
            error = failure
        with contextlib.suppress(RuntimeError):  # the process ends, and the caller's loop is closed
            caller.call_soon_threadsafe(self._report, error)

    def _report(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)
