"""Which unexpected exceptions end a sidecar, and which are only counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast_core.peer.server import CONNECTION_THREAD
from holdfast_core.tasks import Tasks
from holdfast_sidecar.process.lifecycle import Deaths


@pytest.fixture(autouse=True)
def own_thread_hook() -> Iterator[None]:
    hook = threading.excepthook
    yield
    threading.excepthook = hook


def fails() -> None:
    raise KeyError("a name that is not there")


async def task_fails() -> None:
    fails()


class Counted(list[str]):
    """A counter of exceptions that lets a test wait for the first one."""

    def __init__(self) -> None:
        super().__init__()
        self._any = asyncio.Event()

    def one_more(self, kind: str) -> None:
        self.append(kind)
        self._any.set()

    async def first(self) -> None:
        await asyncio.wait_for(self._any.wait(), HANG_SECONDS)


async def installed() -> tuple[Deaths, Counted]:
    counted = Counted()
    deaths = Deaths(counted.one_more)
    deaths.install(asyncio.get_running_loop())
    return deaths, counted


async def test_a_background_task_that_dies_is_fatal() -> None:
    deaths, counted = await installed()
    Tasks().spawn(task_fails(), "staging")
    await asyncio.wait_for(deaths.fatal(), HANG_SECONDS)
    assert counted == ["task"]


async def test_a_deferred_call_that_raises_is_fatal() -> None:
    deaths, counted = await installed()
    Tasks().soon(fails, "reply")
    await asyncio.wait_for(deaths.fatal(), HANG_SECONDS)
    assert counted == ["task"]


async def test_a_cancelled_task_is_no_death() -> None:
    deaths, counted = await installed()
    tasks = Tasks()
    tasks.spawn(asyncio.Event().wait(), "waits")
    await tasks.cancel()
    await asyncio.sleep(0)
    assert not deaths.is_fatal
    assert counted == []


@pytest.mark.fault("A thread of the sidecar dies")
@pytest.mark.parametrize(
    ("name", "kind", "fatal"),
    [("bulk-accept", "thread", True), (CONNECTION_THREAD, "connection", False)],
)
async def test_a_thread_that_dies(name: str, kind: str, fatal: bool) -> None:
    """A peer may be able to end the thread of its own connection, but never the sidecar."""
    deaths, counted = await installed()
    thread = threading.Thread(target=fails, name=name)
    thread.start()
    await counted.first()
    assert counted == [kind]
    assert deaths.is_fatal is fatal


async def test_a_callback_that_raises_is_counted_and_not_fatal() -> None:
    deaths, counted = await installed()
    asyncio.get_running_loop().call_soon(fails)
    await counted.first()
    assert counted == ["callback"]
    assert not deaths.is_fatal
