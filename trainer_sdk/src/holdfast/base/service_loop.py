"""An event loop in a thread of its own, which other threads call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from holdfast_core.errors import UnavailableError

T = TypeVar("T")


class ServiceLoop:
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
        self.error: BaseException | None = None
        """What has ended the loop."""
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._loop.set_exception_handler(self._task_failed)
        self._end: asyncio.Future[None] = self._loop.create_future()
        """Ends the loop: with a result if it was stopped, or with the exception of a task."""
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] | None = set()
        """Calls of `run` that have no result yet. None at the end, when the loop would not run them."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and return its result. Raises UnavailableError if the loop has ended."""
        with self._lock:
            if self._calls is None:
                work.close()
                raise UnavailableError("the service has ended")
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        call.add_done_callback(self._called)
        try:
            return call.result()
        except CancelledError as error:
            raise UnavailableError("the service has ended") from error

    def stop(self) -> None:
        """Let the loop end. Its tasks are cancelled."""
        with self._lock:
            if self._calls is not None:
                self._loop.call_soon_threadsafe(self._finish, None)

    def join(self) -> None:
        self._thread.join()

    def _called(self, call: Future[Any]) -> None:
        with self._lock:
            if self._calls is not None:
                self._calls.discard(call)

    def _run(self) -> None:
        try:
            self._runner.run(self._until_end())
        except BaseException as found:  # noqa: BLE001 - it is passed on
            self.error = found
        with self._lock:
            calls, self._calls = self._calls or set(), None
        for call in calls:
            call.cancel()
        try:
            self._on_end(self.error)
        finally:
            self._runner.close()

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
