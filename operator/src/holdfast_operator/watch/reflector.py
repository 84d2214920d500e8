"""LIST and WATCH one collection for ever, and keep a trimmed copy of it by uid.

1. LIST in pages; what vanished while nobody watched is reported as deleted first.
2. WATCH from there with bookmarks and a read time-out; a clean end watches again from the same place.
3. Any fault: jittered back-off, then 1 again (2 after mere silence). It never exits.
Objects are parsed on arrival: nothing else of them is kept. Decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from holdfast_core.clock import Clock
from holdfast_operator.base import logs
from holdfast_operator.kube.api import ApiError, KubeApi
from holdfast_operator.model.job import Unreadable
from holdfast_operator.watch.unreadable import unreadable

T = TypeVar("T")

GONE = 410


@dataclass(frozen=True, slots=True)
class Collection:
    """What to watch."""

    name: str
    """For logs and metrics."""
    path: str
    selector: str | None = None
    kind: str = "Object"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds; other values are for tests."""

    page: int = 500
    list_seconds: float = 60.0
    watch_seconds: tuple[int, int] = (300, 600)
    silence_seconds: float = 75.0
    """Bookmarks come about once a minute: longer silence means a dead connection."""
    first_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    relist_seconds: float = 1800.0
    short_watch_seconds: float = 1.0


class WatchGone(Exception):
    """The resourceVersion is too old: LIST again."""


class Reflector(Generic[T]):
    """Items by uid. `on_change(old, new)` is called for each difference: old None for an add, new
    None for a delete; never for an object that parses to an equal value.

    `parse` returns None for an object that does not concern us. An object for which it raises exists
    as an Unreadable: it is neither left out nor reported as deleted, and one object that cannot be
    parsed does not stop the watch of all others.
    """

    def __init__(
        self,
        api: KubeApi,
        collection: Collection,
        parse: Callable[[Mapping[str, Any]], T | None],
        on_change: Callable[[T | Unreadable | None, T | Unreadable | None], None],
        clock: Clock,
        timings: Timings | None = None,
    ) -> None:
        self._api = api
        self.collection = collection
        self._parse = parse
        self._on_change = on_change
        self._clock = clock
        self._timings = timings or Timings()
        self._version: str | None = None
        self._list_due = 0.0
        self._items: dict[str, T | Unreadable] = {}
        self._said = logs.Changed()
        self._backoff = self._timings.first_backoff_seconds
        self.synced = asyncio.Event()
        self.last_contact: float | None = None
        """Monotonic seconds of the newest event, bookmark or LIST: the copy is as new as this."""
        self.errors = 0
        self.lists = 0

    @property
    def items(self) -> Mapping[str, T | Unreadable]:
        return self._items

    async def relist(self) -> None:
        """Bring the copy up to date with one LIST. Raises ApiError, WatchGone."""
        await self._list()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                if self._version is None or self._clock.monotonic() >= self._list_due:
                    await self._list()
                begun = self._clock.monotonic()
                await self._watch()
                if self._clock.monotonic() - begun < self._timings.short_watch_seconds:
                    await self._pause()  # a server that ends every watch at once
                else:
                    self._well()
            except WatchGone:
                self._version = None
                await self._pause()
            except Exception as error:  # noqa: BLE001 - whatever it is, watching must go on
                self.errors += 1
                if not (isinstance(error, ApiError) and error.reason == "Timeout"):
                    self._version = None
                self._said.warning(
                    "fault", f"watch of {self.collection.name} failed: {_words(error)}"
                )
                await self._pause()

    async def _pause(self) -> None:
        jitter = 0.5 + random.random()
        await self._clock.sleep(self._backoff * jitter)
        self._backoff = min(self._backoff * 2, self._timings.max_backoff_seconds)

    def _well(self) -> None:
        self._backoff = self._timings.first_backoff_seconds
        if self._said.forget("fault"):
            logs.info(f"watch of {self.collection.name} works again")

    def _params(self) -> dict[str, str]:
        selector = self.collection.selector
        return {} if selector is None else {"labelSelector": selector}

    async def _list(self) -> None:
        seen: dict[str, T | Unreadable] = {}
        token: str | None = None
        while True:
            params = {**self._params(), "limit": str(self._timings.page)}
            if token is not None:
                params["continue"] = token
            try:
                page = await self._api.get(
                    self.collection.path, params, seconds=self._timings.list_seconds
                )
            except ApiError as error:
                if error.status == GONE:
                    raise WatchGone from error
                raise
            for raw in page.get("items") or []:
                item = self._read(raw)
                if item is not None:
                    seen[raw["metadata"]["uid"]] = item
            version, token = page["metadata"]["resourceVersion"], page["metadata"].get("continue")
            if not token:
                break
        for uid in [u for u in self._items if u not in seen]:
            self._drop(uid)
        for uid, item in seen.items():
            self._put(uid, item)
        self._version = version
        self.lists += 1
        now = self._clock.monotonic()
        self._list_due = now + self._timings.relist_seconds * (0.75 + random.random() / 2)
        self.last_contact = now
        self.synced.set()

    async def _watch(self) -> None:
        seconds = random.randint(*self._timings.watch_seconds)
        params = {
            **self._params(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(seconds),
        }
        try:
            async with self._api.stream(
                self.collection.path,
                params,
                total_seconds=seconds + 30,
                read_seconds=self._timings.silence_seconds,
            ) as response:
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line:
                            self._event(json.loads(line))
        except ApiError as error:
            if error.status == GONE:
                raise WatchGone from error
            raise

    def _event(self, event: Mapping[str, Any]) -> None:
        kind, raw = event["type"], event["object"]
        if kind == "ERROR":
            if raw.get("code") == GONE:
                raise WatchGone
            raise ApiError(raw.get("code"), str(raw.get("reason") or ""), str(raw.get("message")))
        if kind != "BOOKMARK":
            uid = raw["metadata"]["uid"]
            item = None if kind == "DELETED" else self._read(raw)
            if item is None:
                self._drop(uid)
            else:
                self._put(uid, item)
        self._version = raw["metadata"]["resourceVersion"]
        self.last_contact = self._clock.monotonic()
        self._well()

    def _read(self, raw: Mapping[str, Any]) -> T | Unreadable | None:
        meta = raw["metadata"]
        subject = f"{meta.get('namespace', '')}/{meta['name']}"
        try:
            item = self._parse(raw)
        except Exception as error:  # noqa: BLE001 - any value may stand in an object of another release
            found = unreadable(self.collection.kind, raw, error)
            self._said.warning(
                subject, f"{found} cannot be read and is left alone: {found.problem}"
            )
            return found
        self._said.forget(subject)
        return item

    def _put(self, uid: str, item: T | Unreadable) -> None:
        old = self._items.get(uid)
        if old != item:
            self._items[uid] = item
            self._on_change(old, item)

    def _drop(self, uid: str) -> None:
        old = self._items.pop(uid, None)
        if old is not None:
            self._on_change(old, None)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
