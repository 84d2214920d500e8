"""What ends: tasks of a component, threads for calls that block, calls that stall, and open objects.

Tasks are referenced while they run, and cancelled together. An exception that a task does not handle is
passed to the event loop's exception handler. The handler of a sidecar process is `deaths.Deaths`, which
then ends the process.

All calls that block run in bounded thread pools: disk, bulk connections of peers, object store. A thread
cannot be cancelled. `drain` therefore also waits for calls whose awaiting task was cancelled, so that a
seal does not list the inventory while a write of the old round is still under way.

A call that neither returns nor makes progress, such as a write to a disk that hangs, is reported as long as
it lasts and is not given up: a thread that is blocked in the kernel cannot be ended, and its bytes may
still be written.

`Signal` is for notifications between components of which one is created before the other. The component that
notifies is created with the signal. The ones that are created later subscribe to it. So
every component is complete after its constructor, although the notifications form circles.

A `with` block ends an object that is `Closing`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

BACKGROUND_TASK = "holdfast background task"
"""Key of the failed task's name in the context of the loop's exception handler."""


class Tasks:
    """The background tasks of one component.

    The event loop references its tasks only weakly, so a task that nothing else references may vanish.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def soon(self, call: Callable[[], object], name: str) -> None:
        """Run `call` on the loop as a task, after the code that runs now has yielded."""

        async def work() -> None:
            call()

        self.spawn(work(), name)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {
                    "message": f"background task {task.get_name()!r} ended with an unexpected error",
                    "exception": error,
                    BACKGROUND_TASK: task.get_name(),
                }
            )

    def __len__(self) -> int:
        return len(self._tasks)

    async def cancel(self) -> None:
        """Cancel all tasks and wait for them. A task that calls this itself is not cancelled."""
        current = asyncio.current_task()
        tasks = [t for t in self._tasks if t is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def join(self, timeout_seconds: float) -> bool:
        """Wait for all tasks that run now. Return False if the time ran out."""
        waiting = set(self._tasks)
        if not waiting:
            return True
        _, pending = await asyncio.wait(waiting, timeout=timeout_seconds)
        return not pending


P = ParamSpec("P")
T = TypeVar("T")


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

    def close(self, *, wait: bool = False) -> None:
        self._executor.shutdown(wait=wait, cancel_futures=True)


async def until_done(
    call: Awaitable[T],
    progress: Callable[[], int],
    *,
    quiet_seconds: float,
    stalled: Callable[[float], object],
    moving: Callable[[], object],
) -> T:
    """Await `call`, report while it makes no progress, and return or raise what it does.

    Args:
        call: The call to await.
        progress: Returns a number that grows with the work, such as a count of bytes.
        quiet_seconds: Period in which the progress is compared.
        stalled: Called after each period without progress, with the seconds that the call has stalled.
        moving: Called when there is progress again.
    """
    task = asyncio.ensure_future(call)
    seen, quiet = progress(), 0.0
    try:
        while not (await asyncio.wait({task}, timeout=quiet_seconds))[0]:
            now = progress()
            if now == seen:
                quiet += quiet_seconds
                stalled(quiet)
            elif quiet:
                quiet = 0.0
                moving()
            seen = now
        return task.result()
    finally:
        task.cancel()


class Signal(Generic[P]):
    """One kind of event. To call the signal is to notify its subscribers, in the order of subscription."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[P, object]] = []

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        self._subscribers.append(subscriber)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)


class Backoff:
    """Back-off of one repeated action. The bound of the pauses doubles up to `last_seconds`.

    The pauses have jitter, so that a gang does not retry in step.
    """

    def __init__(self, first_seconds: float, last_seconds: float) -> None:
        self._first = first_seconds
        self._last = last_seconds
        self._next = first_seconds

    def next_seconds(self) -> float:
        """Return the next pause: a random time between half of the bound and the bound."""
        bound = self._next
        self._next = min(bound * 2, self._last)
        return bound * (0.5 + random.random() / 2)

    def reset(self) -> None:
        self._next = self._first


class Closing(Protocol):
    """Base class of objects with a `close` method: a `with` block calls it at its end."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
