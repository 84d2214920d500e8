"""Handlers that turn SIGTERM and Ctrl-C into a save and a stop at the next step that all ranks agree on.

A handler only sets a flag, so that a rank inside a collective finishes its step first. If a process
hangs, the sender of the signal kills it after its grace period. In a forked child (such as a data
loader's worker) a signal has the same effect as without a Checkpointer.
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
    """Handler of one signal. It is installed only in the main thread, and not over a script's own handler.

    Args:
        number: The signal.
        default: The handler that Python installs at its start. `restore` installs it again.
        on_signal: Called in the main thread, between two instructions of the script.
        once: Handle only the first signal and leave later ones to `default`.
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
        """Install the default handler again.

        Outside the main thread this does nothing, because Python does not allow it there.
        """
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(self._number) == self._handle:
                signal.signal(self._number, self._default)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # This is a child that C code forked, or whose fork hook has not run yet.
        if os.getpid() != self._pid:
            self.restore()
            os.kill(os.getpid(), number)
            return
        if self._once:
            self.restore()
        self._on_signal()


def stop_signal(on_stop: Callable[[], None]) -> HandledSignal:
    """Return a handler of SIGTERM, which Kubernetes and launchers send."""
    return HandledSignal(signal.SIGTERM, signal.SIG_DFL, on_stop)


@contextlib.contextmanager
def interrupts_at_end() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of this block. A second Ctrl-C raises it immediately.

    Raised inside the block, it could leave a lock held that other threads need, or a slot FULL that was
    never handed over. Later saves could then not become durable.
    """
    was_interrupted = False

    def interrupted() -> None:
        nonlocal was_interrupted
        was_interrupted = True
        logger.warning(
            "interrupted: stopping after this save; press Ctrl-C again to stop immediately"
        )

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
