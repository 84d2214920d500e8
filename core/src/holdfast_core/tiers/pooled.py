"""What is handed to a tier's pool of threads, also when the tier is closed meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from holdfast_core.errors import UnavailableError

P = ParamSpec("P")
T = TypeVar("T")

CLOSING = "the tier is being closed"


def submit(
    workers: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    """Raises UnavailableError where the pool takes nothing any more."""
    try:
        return workers.submit(call, *args, **kwargs)
    except RuntimeError as error:
        raise UnavailableError(CLOSING) from error


def wait_all(futures: Iterable[Future[Any]]) -> None:
    """Returns when all have ended, or were cancelled. `concurrent.futures.wait` never returns for one
    that `shutdown(cancel_futures=True)` took out of the queue: it hears of that from a worker only."""
    for future in futures:
        with contextlib.suppress(CancelledError):
            future.exception()
