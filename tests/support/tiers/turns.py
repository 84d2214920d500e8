"""Actors that use one object store, each of which stops before every request until it is advanced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TypeVar

from holdfast_core.tiers.objects import ObjectSource, ObjectStore, Page

T = TypeVar("T")


class Killed(Exception):
    """The process of this actor is dead and sends no more requests to the store."""


class Actor:
    """A thread whose requests to the store are made one at a time, when `advance` allows it."""

    def __init__(self, inner: ObjectStore, work: Callable[[ObjectStore], object]) -> None:
        """Start the thread. It runs `work` with a store of its own until its first request."""
        self._changed = threading.Condition()
        self._waiting = 0
        self._permits = 0
        self._killed = False
        self._ended = False
        self._work = work
        self.error: BaseException | None = None
        """What `work` raised other than Killed. Complete when the actor has ended."""
        self._thread = threading.Thread(
            target=self._run, args=(_Stopping(inner, self),), daemon=True
        )
        self._thread.start()
        with self._changed:
            self._changed.wait_for(self._stands, 60)

    @property
    def ended(self) -> bool:
        return self._ended

    def advance(self, requests: int) -> None:
        """Let the actor make at most this many requests, and wait until it stops again."""
        for _ in range(requests):
            with self._changed:
                if self._ended:
                    return
                self._permits = 1
                self._changed.notify_all()
                assert self._changed.wait_for(self._stands, 60), "the actor does not go on"

    def finish(self) -> None:
        while not self._ended:
            self.advance(1)
        self._thread.join(60)

    def kill(self) -> None:
        """End the actor at the request before which it stands."""
        with self._changed:
            self._killed = True
        self.finish()

    def request(self, call: Callable[[], T]) -> T:
        """Make a request in its turn. Called by the actor's threads."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits > 0)
            self._permits -= 1
            self._waiting -= 1
            if self._killed:
                self._permits = 1  # every other thread of a dead process ends as well
                raise Killed
        return call()

    def _stands(self) -> bool:
        return self._ended or (self._waiting > 0 and self._permits == 0)

    def _run(self, store: ObjectStore) -> None:
        try:
            self._work(store)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


class _Stopping:
    """ObjectStore of one actor. Each key is deleted by a request of its own."""

    def __init__(self, inner: ObjectStore, actor: Actor) -> None:
        self._inner = inner
        self._request = actor.request
        self.name = inner.name

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        self._request(lambda: self._inner.write(key, source, replace=replace))

    def get(self, key: str) -> bytes:
        return self._request(lambda: self._inner.get(key))

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        self._request(lambda: self._inner.read_into(key, start, buffer, stopped))

    def size(self, key: str, *, sure: bool = False) -> int | None:
        return self._request(lambda: self._inner.size(key, sure=sure))

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        return self._request(lambda: self._inner.list(prefix, page, folders=folders))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._request(lambda key=key: self._inner.delete([key]))  # type: ignore[misc]

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        return self._request(lambda: self._inner.abort_stale(prefixes, older_than))

    def close(self) -> None:
        """Do nothing: the actors of a test share the inner store."""
