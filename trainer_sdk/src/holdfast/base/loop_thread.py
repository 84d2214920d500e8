"""An event loop in a thread of its own, which other threads call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from holdfast_core.errors import UnavailableError

T = TypeVar("T")


class LoopThread:
    """Thread that runs one coroutine on its event loop until `stop`, and what other threads pass to `run`.

    An exception that a task of the loop does not handle ends the loop, too.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[Any, Any, None]],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Create the loop, whose thread `start` starts.

        Args:
            name: Name of the thread.
            main: Returns the coroutine.
            on_end: Called in the thread, before the loop is closed, with the exception that has ended it.
        """
        self._main = main
        self._on_end = on_end
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._task_failed)
        self._end: asyncio.Future[None] = self._loop.create_future()
        """Ends the loop: with a result if it was stopped, or with the exception of a task."""
        self._lock = threading.Lock()
        self._is_closed = False
        """Whether the loop takes no more calls, which it would not run."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result. Raises UnavailableError if the loop has ended."""
        with self._lock:
            if self._is_closed:
                work.close()
                raise UnavailableError("the service has ended")
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except CancelledError as error:
            raise UnavailableError("the service has ended") from error

    def stop(self) -> None:
        """Let the loop end. Its tasks are cancelled."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._finish, None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._loop.run_until_complete(self._until_end())
        except BaseException as found:  # noqa: BLE001 - it is passed on
            error = found
        with self._lock:
            self._is_closed = True
        try:
            self._loop.run_until_complete(_cancel_all())
            self._on_end(error)
        finally:
            self._loop.close()

    async def _until_end(self) -> None:
        main = asyncio.create_task(self._main())
        done, _ = await asyncio.wait({main, self._end}, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    def _finish(self, error: BaseException | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _task_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if isinstance(error := context.get("exception"), BaseException):
            self._finish(error)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
