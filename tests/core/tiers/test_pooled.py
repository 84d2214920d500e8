"""What happens to queued tasks when their pool is closed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast_core.errors import UnavailableError
from holdfast_core.tiers.sources import run_all, submit, wait_all


def test_a_task_that_was_cancelled_in_the_queue_is_not_waited_for() -> None:
    """concurrent.futures.wait would wait for ever here."""
    workers, begun, go_on = ThreadPoolExecutor(1), threading.Event(), threading.Event()

    def run() -> bool:
        begun.set()
        return go_on.wait(HANG_SECONDS)

    running, queued = submit(workers, run), submit(workers, int)
    assert begun.wait(HANG_SECONDS)  # until then, the end of the pool would cancel it, too
    workers.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    wait_all([running, queued])
    assert (running.result(), queued.cancelled()) == (True, True)


def test_an_error_is_raised_when_the_result_is_requested() -> None:
    with ThreadPoolExecutor(1) as workers:
        failed = submit(workers, int, "no number")
        wait_all([failed])
    with pytest.raises(ValueError, match="no number"):
        failed.result()


def test_a_pool_that_is_closed_takes_nothing() -> None:
    workers = ThreadPoolExecutor(1)
    workers.shutdown()
    with pytest.raises(UnavailableError, match="being closed"):
        submit(workers, int)


@pytest.mark.fault("A store is closed while calls wait in its pool")
def test_calls_that_are_cut_short_are_not_taken_for_made() -> None:
    workers = ThreadPoolExecutor(1)
    made: list[int] = []

    def call(number: int) -> None:
        made.append(number)
        workers.shutdown(wait=False, cancel_futures=True)

    with pytest.raises(UnavailableError, match="being closed"):
        run_all(workers, call, range(100))
    assert made == [0]


def test_of_many_calls_the_first_error_is_raised() -> None:
    with ThreadPoolExecutor(2) as workers:
        with pytest.raises(ValueError, match="no number"):
            run_all(workers, int, ["1", "no number", "2"])
        run_all(workers, int, ["1", "2"])
