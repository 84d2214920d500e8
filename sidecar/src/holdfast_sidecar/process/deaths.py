"""Handling of uncaught exceptions in a sidecar process.

A background task or thread that ends with an exception leaves a part of the sidecar missing while the rest
looks healthy. Therefore the process ends, the kubelet restarts the container, and the next process resumes
from the node's disk and the shared memory. Exceptions of single connections and callbacks, which a peer may
be able to cause, are only counted and logged.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from holdfast_core.peer.server import CONNECTION_THREAD
from holdfast_core.tasks import BACKGROUND_TASK
from holdfast_sidecar.base import logs

DIED_STATUS = 70
"""Exit status of a sidecar that an unexpected exception ended (EX_SOFTWARE)."""
_SHUTDOWN_SECONDS = 30.0


class Deaths:
    """Handler of the uncaught exceptions of one event loop and of all threads of this process."""

    def __init__(self, counted: Callable[[str], None]) -> None:
        """Create the handler; `install` puts it in place.

        Args:
            counted: Called on the loop with the kind of each uncaught exception: "task", "thread",
                "callback" or "connection".
        """
        self._counted = counted
        self._log_changes = logs.Changed()
        self._fatal = asyncio.Event()

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Install the handlers of the loop and of all threads. Call this on the loop."""
        loop.set_exception_handler(self.in_loop)

        def in_thread(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not loop.is_closed():
                name = "?" if args.thread is None else args.thread.name
                loop.call_soon_threadsafe(self.in_thread, name, args.exc_value)

        threading.excepthook = in_thread

    @property
    def is_fatal(self) -> bool:
        return self._fatal.is_set()

    async def fatal(self) -> None:
        """Return once an exception was fatal."""
        await self._fatal.wait()

    def in_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the loop. Only that of a background task is fatal."""
        error = context.get("exception")
        if BACKGROUND_TASK in context:
            self._die(context["message"], error, "task")
        else:
            self._counted("callback")
            self._log_changes.log("event loop", f"{context['message']}: {error!r}")

    def in_thread(self, name: str, error: BaseException) -> None:
        """Handle the exception that ended a thread. That of a bulk connection's thread is not fatal."""
        if name == CONNECTION_THREAD:
            self._counted("connection")
            self._log_changes.log(
                "bulk connection", f"the thread of a bulk connection ended: {error!r}"
            )
        else:
            self._die(f"thread {name!r} ended with an unexpected error", error, "thread")

    def _die(self, what: str, error: BaseException | None, kind: str) -> None:
        self._counted(kind)
        if error is not None:
            logs.failure(f"{what}: the sidecar ends with status {DIED_STATUS}", error)
        self._fatal.set()


def end_for_sure() -> None:
    """End this process after `_SHUTDOWN_SECONDS`, even if its shutdown hangs."""
    guard = threading.Timer(_SHUTDOWN_SECONDS, os._exit, (DIED_STATUS,))
    guard.daemon = True
    guard.start()
