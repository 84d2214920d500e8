"""Settings of all tests.

No property test has a deadline, because a busy machine would break it. Under CI the examples are the
same in each run, so that a red run is about the change; elsewhere they are new each time.

Processes that a test starts find `tests.support` as the test does, from whatever directory they run in.
A shell that starts the tests in the background makes them ignore SIGINT, and the processes that they
start inherit that: Ctrl-C would do nothing in the tests that send it.

A test may be an `async def`: it runs in an event loop of its own.

A test closes what it has opened. A process runs hundreds of files, and what they leave open would add up
until a test of another file finds no free descriptor, or one whose number is too high for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.support.file_order import place_of, unit_of

TESTS = Path(__file__).resolve().parent
_LEFT_OPEN = 32
"""Threads that outlive a file's tests, and connections that modules keep, hold a few."""
settings.register_profile("holdfast", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("holdfast")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH")))
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest. The tests of a file keep their order."""
    items.sort(key=lambda item: place_of(item.path.relative_to(TESTS).as_posix()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each process of `pytest -n` one unit of files after the other."""
    from xdist.scheduler import LoadFileScheduling  # some environments have no pytest-xdist

    class Units(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid.partition("::")[0].removeprefix("tests/"))

    return Units(config, log)


@pytest.fixture(autouse=True, scope="module")
def _closed_files() -> Iterator[None]:
    """Fail the last test of a file that leaves many files open."""
    before = len(_open_files())
    yield
    if len(_open_files()) - before > _LEFT_OPEN:
        gc.collect()
        left = _open_files()
        assert len(left) - before <= _LEFT_OPEN, f"the tests of this file left files open: {left}"


def _open_files() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread has closed it
            found.append(os.readlink(descriptor))
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is an `async def` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    signature = inspect.signature(pyfuncitem.obj)
    asyncio.run(
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in signature.parameters})
    )
    return True
