"""An event loop that other threads call, and that ends while they do."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast.directory.saves import ServiceLoop
from holdfast_core.errors import UnavailableError


class Main:
    """A coroutine that runs until it is stopped or fails."""

    def __init__(self) -> None:
        self.ends: list[BaseException | None] = []
        self.error: BaseException | None = None
        self.thread = ServiceLoop("test", self, self.ends.append)
        self._go = asyncio.Event()

    async def __call__(self) -> None:
        await self._go.wait()
        if self.error is not None:
            raise self.error

    async def fail(self, error: BaseException) -> None:
        self.error = error
        self._go.set()


async def answer() -> int:
    return 42


async def never(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def test_a_call_has_its_result_and_a_later_one_is_refused() -> None:
    main = Main()
    main.thread.start()
    assert main.thread.run(answer()) == 42
    main.thread.stop()
    main.thread.join()
    assert main.ends == [None]
    with pytest.raises(UnavailableError, match="has ended"):
        main.thread.run(answer())
    main.thread.stop()  # once more does no harm


@pytest.mark.fault("The writer of a folder ends while a rank hands a slot over")
def test_a_call_under_way_ends_with_the_loop() -> None:
    main, begun = Main(), threading.Event()
    main.thread.start()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(main.thread.run, never(begun))
        assert begun.wait(HANG_SECONDS)
        main.thread.stop()
        with pytest.raises(UnavailableError, match="has ended"):
            call.result(HANG_SECONDS)


def test_an_exception_ends_the_loop_and_is_passed_on() -> None:
    main, error = Main(), MemoryError("no memory")
    main.thread.start()
    main.thread.run(main.fail(error))
    main.thread.join()
    assert main.ends == [error]


def test_a_task_that_nothing_awaits_ends_the_loop_with_its_exception() -> None:
    main, error = Main(), RuntimeError("unexpected")

    async def leave_task() -> None:
        async def task() -> None:
            raise error

        loop = asyncio.get_running_loop()
        running = loop.create_task(task())
        await asyncio.wait({running})
        loop.call_exception_handler({"message": "a task failed", "exception": error})

    main.thread.start()
    main.thread.run(leave_task())
    main.thread.join()
    assert main.ends == [error]
