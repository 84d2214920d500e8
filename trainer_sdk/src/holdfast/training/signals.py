"""SIGTERM and Ctrl-C as "save and stop at the next step all agree on".

The handler only sets a flag: a rank inside a collective finishes its step first. What hangs is ended
by the sender of the signal, after its grace. A forked child (a data loader's worker) has no step to
finish: there a signal does what it would do without a Checkpointer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class HandledSignal:
    """Installed only in the main thread, and only where the script has no handler of its own.

    Args:
        number: The signal.
        default: The handler that Python starts with; it is put back.
        on_signal: Called in the main thread, between two instructions of the script.
        once: The default handles the signal from the second one on.
    """

    def __init__(
        self,
        number: signal.Signals,
        default: Any,
        on_signal: Callable[[], None],
        *,
        once: bool = False,
    ) -> None:
        self._number = number
        self._default = default
        self._on_signal = on_signal
        self._once = once
        self._installed = False
        self._pid = os.getpid()
        _signals.add(self)

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self._number) is not self._default:
            return
        self._pid = os.getpid()
        signal.signal(self._number, self._handle)
        self._installed = True

    def restore(self) -> None:
        """In another thread than `install` nothing: Python does not allow it there."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(self._number) == self._handle:
                signal.signal(self._number, self._default)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child that C code forked, or that has just been forked
            self.restore()
            os.kill(os.getpid(), number)
            return
        if self._once:
            self.restore()
        self._on_signal()


def stop_signal(on_stop: Callable[[], None]) -> HandledSignal:
    """SIGTERM, as Kubernetes and launchers send it."""
    return HandledSignal(signal.SIGTERM, signal.SIG_DFL, on_stop)


@contextlib.contextmanager
def interrupts_at_end() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt at the end of this block; a second one raises it at once.

    Raised in the middle, it could leave a lock held that other threads need, or a slot full that no
    process was asked to write: no later save would become durable.
    """
    was_interrupted = False

    def interrupted() -> None:
        nonlocal was_interrupted
        was_interrupted = True
        logger.warning("interrupted: stopping after this save; press Ctrl-C again to stop at once")

    handled = HandledSignal(signal.SIGINT, signal.default_int_handler, interrupted, once=True)
    handled.install()
    try:
        yield
    finally:
        handled.restore()
        if was_interrupted:
            raise KeyboardInterrupt


_signals: weakref.WeakSet[HandledSignal] = weakref.WeakSet()


def _restore_all() -> None:
    for one in tuple(_signals):
        one.restore()


os.register_at_fork(after_in_child=_restore_all)
