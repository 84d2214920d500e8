"""Futures, as torch.distributed.checkpoint returns them, for saves of Holdfast."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from holdfast.base.handle import SaveHandle
from holdfast_core.errors import HoldfastError

WAIT_SECONDS = 1800.0
"""Longest wait for a save to become durable: the time-out of torch's own collectives."""


def future_of(handle: SaveHandle) -> Future[SaveHandle]:
    """Return a Future that ends when the save is durable, or raises why it cannot become durable."""
    future: Future[SaveHandle] = Future()
    future.set_running_or_notify_cancel()
    # A thread of a pool would keep the interpreter from ending while the save is written.
    threading.Thread(
        target=_settle, args=(handle, future), name="holdfast-future", daemon=True
    ).start()
    return future


def _settle(handle: SaveHandle, future: Future[SaveHandle]) -> None:
    try:
        handle.wait("local", WAIT_SECONDS)
    except HoldfastError as error:
        future.set_exception(error)
    else:
        future.set_result(handle)
