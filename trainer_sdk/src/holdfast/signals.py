"""SIGTERM as "save and stop at the next step all agree on", while a Checkpointer is open.

The handler only sets a flag: a rank inside a collective finishes its step first. What hangs is ended
by whoever sent the signal, after its grace.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignal:
    """Installed only in the main thread, and only where the user has no handler of his own."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True

    def restore(self) -> None:
        """In another thread than `install` nothing: Python does not allow it there."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_stop()
