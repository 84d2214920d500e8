"""Background tasks of a component: referenced while they run, and cancelled together.

An exception that a task does not handle is passed to the event loop's exception handler. The handler of a
sidecar process is `deaths.Deaths`, which then ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

BACKGROUND_TASK = "holdfast background task"
"""Key of the failed task's name in the context of the loop's exception handler."""

_SPAWNED_AT_ONCE = 64


class Tasks:
    """The background tasks of one component. asyncio itself keeps only weak references to tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def spawn_all(self, works: Iterable[tuple[Coroutine[Any, Any, Any], str]]) -> None:
        """Spawn many tasks, so that the event loop does other work in between. Spawn this as a task."""
        for count, (work, name) in enumerate(works):
            self.spawn(work, name)
            if count % _SPAWNED_AT_ONCE == _SPAWNED_AT_ONCE - 1:
                await asyncio.sleep(0)

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
