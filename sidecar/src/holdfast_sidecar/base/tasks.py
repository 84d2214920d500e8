"""Background tasks of a component: kept alive, cancelled together, never silent when they die.

An exception that a task does not handle goes to the event loop's exception handler, as one of a
callback does. The handler of a sidecar process is `deaths.Deaths`: it ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

BACKGROUND_TASK = "holdfast background task"
"""Key in the context of the loop's exception handler: the name of the task that died."""


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def soon(self, call: Callable[[], object], name: str) -> None:
        """Run `call` on the loop after what runs now; its exceptions are handled as a task's."""

        async def work() -> None:
            call()

        self.spawn(work(), name)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {
                    "message": f"background task {task.get_name()!r} died",
                    "exception": error,
                    BACKGROUND_TASK: task.get_name(),
                }
            )

    def __len__(self) -> int:
        return len(self._tasks)

    async def cancel(self) -> None:
        """Cancel all and wait; a task that cancels its own group is left alone."""
        current = asyncio.current_task()
        tasks = [t for t in self._tasks if t is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def join(self, timeout_seconds: float) -> bool:
        """Wait for all that run now; False if the time ran out."""
        waiting = set(self._tasks)
        if not waiting:
            return True
        _, pending = await asyncio.wait(waiting, timeout=timeout_seconds)
        return not pending
