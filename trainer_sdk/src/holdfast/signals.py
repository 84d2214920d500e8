"""SIGTERM as "save and stop at the next step all agree on", while a Checkpointer is open.

The handler only sets a flag: a rank inside a collective finishes its step first. What hangs is ended
by the sender of the signal, after its grace. A forked child (a data loader's worker) has no step to
finish: there SIGTERM ends the process, as it would without a Checkpointer.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopSignal:
    """Installed only in the main thread, and only where the user has no handler of his own."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._previous: Any = None
        self._installed = False
        self._pid = os.getpid()
        _signals.add(self)

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._pid = os.getpid()
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True

    def restore(self) -> None:
        """In another thread than `install` nothing: Python does not allow it there."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._previous)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child that C code forked, or that has just been forked
            self.restore()
            os.kill(os.getpid(), number)
            return
        self._on_stop()


_signals: weakref.WeakSet[StopSignal] = weakref.WeakSet()


def _restore_all() -> None:
    for one in tuple(_signals):
        one.restore()


os.register_at_fork(after_in_child=_restore_all)
