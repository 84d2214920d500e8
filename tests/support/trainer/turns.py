"""Threads that a test lets run in turns, from one request to the gang's store to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.support.trainer.dict_store import DictStore


class Died(BaseException):
    """Raised in a thread whose process the test has killed."""


class Turns:
    """Runs threads one at a time. Each stops before its next request to the store."""

    def __init__(self) -> None:
        self._actors: dict[str, _Actor] = {}
        self._by_thread: dict[int, _Actor] = {}

    def add(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread, which stops before its first statement."""
        self._actors[name] = _Actor(self._by_thread, work)

    @property
    def waiting(self) -> list[str]:
        """Names of the threads that have not ended."""
        return [name for name, actor in self._actors.items() if not actor.has_ended]

    def let_run(self, name: str) -> None:
        """Let a thread run until it stops before its next request, or ends. Raise what it raised."""
        self._actors[name].run()

    def kill(self, name: str) -> None:
        """End a thread in the place where it waits."""
        self._actors[name].kill()

    def stop_here(self) -> None:
        """Called by a thread: wait until the test lets it run."""
        self._by_thread[threading.get_ident()].stop_here()


class _Actor:
    def __init__(self, by_thread: dict[int, _Actor], work: Callable[[], None]) -> None:
        self.has_ended = False
        self._by_thread = by_thread
        self._work = work
        self._may_run = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        self._is_killed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self._has_stopped.acquire()

    def run(self) -> None:
        self._may_run.release()
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        if not self.has_ended:
            self._is_killed = True
            self.run()

    def stop_here(self) -> None:
        self._has_stopped.release()
        self._may_run.acquire()
        if self._is_killed:
            raise Died

    def _main(self) -> None:
        self._by_thread[threading.get_ident()] = self
        try:
            self.stop_here()
            self._work()
        except Died:
            pass
        except Exception as error:  # noqa: BLE001 - `run` raises it in the test
            self._error = error
        finally:
            self.has_ended = True
            self._has_stopped.release()


class TurnStore(DictStore):
    """Store whose every request is one turn of the calling thread."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def set(self, key: str, value: str, /) -> None:
        self._turns.stop_here()
        super().set(key, value)

    def get(self, key: str, /) -> bytes:
        self._turns.stop_here()
        return super().get(key)

    def check(self, keys: list[str], /) -> bool:
        self._turns.stop_here()
        return super().check(keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self._turns.stop_here()
        return super().compare_set(key, expected, desired)

    def add(self, key: str, amount: int, /) -> int:
        self._turns.stop_here()
        return super().add(key, amount)
