"""Submission to a tier's thread pool that is safe while another thread closes the tier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, ParamSpec, TypeVar

from holdfast_core.errors import UnavailableError

P = ParamSpec("P")
T = TypeVar("T")

CLOSING = "the tier is being closed"


def submit(workers: Executor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Submit the call to the pool. Raises UnavailableError if the pool is shut down."""
    try:
        return workers.submit(call, *args, **kwargs)
    except RuntimeError as error:
        raise UnavailableError(CLOSING) from error


def run_all(workers: Executor, call: Callable[[T], object], items: Iterable[T]) -> None:
    """Make the call for each item in the pool.

    Raises the error of the first call that failed; no further call is begun then. Raises UnavailableError
    if the pool is shut down before all calls were made.
    """
    futures: list[Future[object]] = []
    try:
        for item in items:
            futures.append(submit(workers, call, item))
        for future in futures:
            future.result()
    except CancelledError as error:
        raise UnavailableError(CLOSING) from error
    finally:
        for future in futures:
            future.cancel()


def wait_all(futures: Iterable[Future[Any]]) -> None:
    """Wait until each future has ended or is cancelled. Errors of the futures are ignored.

    `concurrent.futures.wait` is not usable here: it never returns for a future that
    `shutdown(cancel_futures=True)` took out of the queue, because only a worker thread would notify it.
    """
    for future in futures:
        with contextlib.suppress(CancelledError):
            future.exception()
