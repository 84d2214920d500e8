"""LIST and WATCH one collection forever, and keep parsed records of its objects by uid.

1. A streamed list: WATCH, which sends the present objects first, and then a bookmark that marks their end
   (ADR 0005). Objects that were deleted since the last copy are reported first. If the server refuses it for
   another reason than its load or our rights, or ends it before the bookmark, the next list is a LIST in
   pages.
2. The same WATCH, or one from the resourceVersion of the LIST, with bookmarks and a read time-out. When the
   server ends the watch, a new one starts from the newest resourceVersion.
3. After any error, wait for a jittered back-off and continue with 1, after a time-out with 2.
4. `relist_soon` ends the watch, and 1 follows.

Objects are parsed on arrival, and only the records are kept. Kubernetes guarantees the order of the
resourceVersions of one collection since version 1.35.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_operator.base.settings import DEFAULT_SILENCE_SECONDS
from holdfast_operator.kube.api import ApiError, KubeApi
from holdfast_operator.model.job import Unreadable
from holdfast_operator.watch.records import unreadable


def is_at_least(seen: str, expected: str) -> bool:
    """Return whether `seen` is `expected` or newer. If one of them is no number, only equality counts."""
    if seen.isdecimal() and expected.isdecimal():
        return int(seen) >= int(expected)
    return seen == expected


T = TypeVar("T")

GONE = 410
NO_STREAMED_LISTS = (400, 422)
"""Statuses of a server that does not know the parameters of a streamed list, or forbids them."""
OTHER_REFUSALS = (None, 401, 403, 429)
"""Statuses that do not concern streamed lists: no answer, no rights, and a server that is busy. A server that
has just started does not know the operator's rights yet, and answers with 403 or 429."""
_END_OF_LIST = "k8s.io/initial-events-end"
"""Annotation of the bookmark after the last present object."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection of the API to watch."""

    name: str
    """Name in logs and metrics."""
    path: str
    selector: str | None = None
    kind: str = "Object"


@dataclass(frozen=True, slots=True)
class Timings:
    """Time-outs and intervals in seconds. Except for `silence_seconds`, only tests use other values."""

    page: int = 100
    """Objects in one page of a LIST. The parsed JSON of a page of 500 pods takes some 40 MiB."""
    list_seconds: float = 60.0
    """Longest duration of the request for one page."""
    streamed_list_seconds: float = 120.0
    """Longest duration of a streamed list. A server may never send the bookmark that marks its end."""
    watch_seconds: tuple[int, int] = (300, 600)
    """Shortest and longest duration of one watch; each watch takes a random one between them."""
    silence_seconds: float = DEFAULT_SILENCE_SECONDS
    """Read time-out."""
    first_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    quiet_seconds: float = 30.0
    """Time without contact after which `contact_since` begins again. In a small cluster whose kubelets renew
    their leases rarely, nothing arrives for many seconds although the API server answers."""
    relist_seconds: float = 1800.0
    """Mean time between two LISTs, jittered by a quarter."""
    relist_soonest_seconds: float = 15.0
    """Shortest time between a LIST and the next one that `relist_soon` causes."""
    short_watch_seconds: float = 1.0
    """A watch that ends sooner is followed by a back-off."""


class WatchGone(Exception):
    """Error of a resourceVersion that is too old, so that a new LIST is required."""


class Reflector(Generic[T]):
    """Copy of one collection: parsed items by uid.

    Args:
        parse: Turns an object into an item, or into None if the object is not relevant. If it raises, the
            item is an Unreadable. Such an object is neither left out nor reported as deleted, and the
            watch of the others continues.
        on_change: Called as `on_change(old, new)` for each difference. `old` is None for a new object and
            `new` is None for a deleted one. It is not called where old and new are equal.
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
        self._arriving: dict[str, tuple[str, T | Unreadable]] | None = None
        """resourceVersions and items by uid, until all objects of a streamed list have arrived."""
        self._in_pages = False
        """Whether the next list is a LIST in pages."""
        self._listed = 0.0
        self._watching: asyncio.Timeout | None = None
        """Limit of the present watch, until `relist_soon` has moved it to now."""
        self._list_due = 0.0
        self._items: dict[str, T | Unreadable] = {}
        self._taken: dict[str, str] = {}
        """resourceVersions of the objects that `take` has stored since the newest list began, and that no
        event has had yet. A later list replaces them, because etcd may have been restored since."""
        self._log_changes = logs.Changed()
        self._backoff = self._timings.first_backoff_seconds
        self.synced = asyncio.Event()
        self.last_contact: float | None = None
        """Monotonic time of the newest event, bookmark or LIST. The copy is at least as new as this."""
        self.contact_since = 0.0
        """Monotonic time of the first contact after the newest silence of more than `quiet_seconds`."""
        self.last_turn = clock.monotonic()
        """Monotonic time of the newest sign of life of `run`: an event, a page of a LIST, or the end of a
        request, whether it succeeded or failed."""
        self.errors = 0
        self.lists = 0

    @property
    def items(self) -> Mapping[str, T | Unreadable]:
        return self._items

    async def run(self) -> None:
        """Watch until cancelled. Errors are logged and retried."""
        while True:
            self.last_turn = self._clock.monotonic()
            try:
                due = self._version is None or self._clock.monotonic() >= self._list_due
                if due and self._in_pages:
                    self._in_pages = due = False
                    await self.relist()
                begun = self._clock.monotonic()
                await self._watch_until_relist(with_list=due)
                if self._in_pages:
                    continue  # a LIST in pages is no repetition of the request that failed
                if self._clock.monotonic() - begun < self._timings.short_watch_seconds:
                    await self._pause()  # the server may end every watch immediately
                else:
                    self._reset_backoff()
            except WatchGone:
                self._version = None
                await self._pause()
            except Exception as error:  # noqa: BLE001 - no error may end the watch
                self.errors += 1
                if not (isinstance(error, ApiError) and error.reason == "Timeout"):
                    self._version = None
                self._log_changes.warning(
                    "fault", f"watch of {self.collection.name} failed: {_text(error)}"
                )
                await self._pause()

    async def _pause(self) -> None:
        jitter = 0.5 + random.random()
        await self._clock.sleep(self._backoff * jitter)
        self._backoff = min(self._backoff * 2, self._timings.max_backoff_seconds)

    def _reset_backoff(self) -> None:
        self._backoff = self._timings.first_backoff_seconds
        if self._log_changes.forget("fault"):
            logs.info(f"watch of {self.collection.name} works again")

    def _params(self) -> dict[str, str]:
        selector = self.collection.selector
        return {} if selector is None else {"labelSelector": selector}

    async def relist(self) -> None:
        """Update the copy by one LIST in pages. Raises ApiError or WatchGone."""
        seen: dict[str, tuple[str, T | Unreadable]] = {}
        token: str | None = None
        self._taken.clear()
        while True:
            params = {**self._params(), "limit": str(self._timings.page)}
            if token is not None:
                params["continue"] = token
            try:
                page = await self._api.get_page(
                    self.collection.path, params, seconds=self._timings.list_seconds
                )
            except ApiError as error:
                if error.status == GONE:
                    raise WatchGone from error
                raise
            self.last_turn = self._clock.monotonic()
            for raw in page.get("items") or []:
                item = self._read(raw)
                if item is not None:
                    seen[raw["metadata"]["uid"]] = raw["metadata"]["resourceVersion"], item
            version, token = page["metadata"]["resourceVersion"], page["metadata"].get("continue")
            if not token:
                break
        self._replace(seen)
        self._reached(version)

    def _replace(self, seen: Mapping[str, tuple[str, T | Unreadable]]) -> None:
        """Let the copy have these objects only, which a list has sent."""
        for uid in [u for u in self._items if u not in seen]:
            self._drop(uid)
        for uid, (at, item) in seen.items():
            if not self._is_outdated(uid, at):
                self._put(uid, item)
        self.lists += 1
        now = self._clock.monotonic()
        self._listed = now
        self._list_due = now + self._timings.relist_seconds * (0.75 + random.random() / 2)
        self.synced.set()

    def relist_soon(self) -> None:
        """End the watch for a LIST, unless the last one is recent, because the copy lacks an object.

        Otherwise an object that one LIST lacked would stay hidden until it changes, or for half an hour.
        """
        now = self._clock.monotonic()
        recent = now - self._listed < self._timings.relist_soonest_seconds
        if recent or self._arriving is not None:
            return
        self._list_due = now
        if self._watching is not None:
            self._watching.reschedule(asyncio.get_running_loop().time())
            self._watching = None  # a limit that has passed cannot be moved again

    def take(self, reply: Mapping[str, Any]) -> None:
        """Store an object of the copy from the reply to a write, which is newer than the copy.

        Events and LISTs that were under way before the write do not replace it. The next pass need not wait
        for the watch.
        """
        uid, version = reply["metadata"]["uid"], reply["metadata"]["resourceVersion"]
        item = self._read(reply) if uid in self._items and version.isdecimal() else None
        if item is not None:
            self._put(uid, item)
            self._taken[uid] = version

    def _is_outdated(self, uid: str, version: str) -> bool:
        """Return whether `take` has stored a newer version than this one of an event or a LIST."""
        return uid in self._taken and not is_at_least(version, self._taken[uid])

    async def _watch_until_relist(self, *, with_list: bool) -> None:
        """Watch until the server ends the watch, or `relist_soon` does."""
        limit = asyncio.timeout(self._timings.streamed_list_seconds if with_list else None)
        try:
            async with limit:
                self._watching = limit
                self._arriving = {} if with_list else None
                if with_list:
                    self._taken.clear()
                await self._watch()
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._watching = None
            self._arriving = None

    async def _watch(self) -> None:
        seconds = random.randint(*self._timings.watch_seconds)
        params = {
            **self._params(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        if self._arriving is None:
            params["resourceVersion"] = self._version or ""
        else:
            params |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        try:
            async with self._api.stream(
                self.collection.path,
                params,
                total_seconds=seconds + 30,
                read_seconds=self._timings.silence_seconds,
            ) as response:
                self._in_pages = self._arriving is not None  # until all objects have arrived
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line:
                            self._event(json.loads(line))
        except ApiError as error:
            listing = self._arriving is not None
            if listing and error.status not in OTHER_REFUSALS:
                self._in_pages = True
            if error.status == GONE:
                raise WatchGone from error
            if not listing or error.status not in NO_STREAMED_LISTS:
                raise

    def _event(self, event: Mapping[str, Any]) -> None:
        kind, raw = event["type"], event["object"]
        if kind == "ERROR":
            if raw.get("code") == GONE:
                raise WatchGone
            raise ApiError(raw.get("code"), str(raw.get("reason") or ""), str(raw.get("message")))
        meta = raw["metadata"]
        self.last_turn = self._clock.monotonic()
        if kind != "BOOKMARK":
            item = None if kind == "DELETED" else self._read(raw)
            self._apply(meta["uid"], meta["resourceVersion"], item)
        elif self._arriving is not None and _END_OF_LIST in (meta.get("annotations") or {}):
            seen, self._arriving, self._in_pages = self._arriving, None, False
            if self._watching is not None:
                self._watching.reschedule(None)
            self._replace(seen)
        if self._arriving is None:
            self._reached(meta["resourceVersion"])
            self._reset_backoff()

    def _reached(self, version: str) -> None:
        """Record that the copy is of this resourceVersion, and as new as now."""
        self._version = version
        now, last = self._clock.monotonic(), self.last_contact
        if last is None or now - last > self._timings.quiet_seconds:
            self.contact_since = now
        self.last_contact = now

    def _apply(self, uid: str, version: str, item: T | Unreadable | None) -> None:
        """Store the object of an event, or drop it if it is None."""
        if self._arriving is not None:
            self._arriving.pop(uid, None)
            if item is not None:
                self._arriving[uid] = version, item
        elif self._is_outdated(uid, version):
            return
        elif item is None:
            self._drop(uid)
        else:
            self._put(uid, item)

    def _read(self, raw: Mapping[str, Any]) -> T | Unreadable | None:
        meta = raw["metadata"]
        subject = f"{meta.get('namespace', '')}/{meta['name']}"
        try:
            item = self._parse(raw)
        except Exception as error:  # noqa: BLE001 - another release may have written any value
            found = unreadable(self.collection.kind, raw, error)
            self._log_changes.warning(
                subject,
                (f"{found} cannot be read, and the operator does not change it: {found.problem}"),
            )
            return found
        self._log_changes.forget(subject)
        return item

    def _put(self, uid: str, item: T | Unreadable) -> None:
        old = self._items.get(uid)
        self._taken.pop(uid, None)
        if old != item:
            self._items[uid] = item
            self._on_change(old, item)

    def _drop(self, uid: str) -> None:
        old = self._items.pop(uid, None)
        self._taken.pop(uid, None)
        if old is not None:
            self._on_change(old, None)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
