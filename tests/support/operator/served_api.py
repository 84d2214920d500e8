"""One collection of a FakeApi over HTTP, with lists in pages, watches, and faults on demand.

It serves reads alone: tests change the objects of the FakeApi, whose events reach the open watches. `faults`
hit the next requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web
from tests.support.operator.fake_api import FakeApi, Raw


class Fault(StrEnum):
    GONE = "gone"
    """Status 410 for a WATCH request."""
    ERROR_EVENT = "error-event"
    """ERROR event with code 500 inside the stream."""
    GONE_EVENT = "gone-event"
    """ERROR event with code 410 inside the stream."""
    FORBIDDEN = "forbidden"
    SERVER_ERROR = "server-error"
    BUSY = "busy"
    """Status 429."""
    RESET = "reset"
    """Connection reset in the middle of an answer."""
    SILENT = "silent"
    """Half-open connection: the server accepts the watch and sends nothing, although objects change."""
    GARBAGE = "garbage"
    """Line that is not JSON."""
    EXPIRED_CONTINUE = "expired-continue"
    """Status 410 for the second page of a LIST."""
    CUT_LIST = "cut-list"
    """Clean end of a streamed list after its first object."""
    NO_BOOKMARK = "no-bookmark"
    """Streamed list without the bookmark that marks its end. `bookmark` sends it later."""


PLURAL = "things"
PATH = f"/apis/example.com/v1/{PLURAL}"
"""The collection that is served. Its objects belong to no namespace."""

_STATUSES = {Fault.FORBIDDEN: 403, Fault.SERVER_ERROR: 500, Fault.BUSY: 429}


@dataclass
class ServedApi:
    """Server of the collection PATH. `url` is set by `start`. Every GET reads it, whatever its path."""

    api: FakeApi = field(default_factory=FakeApi)
    faults: list[Fault] = field(default_factory=list)
    """Pending faults. Each hits the first request to which it applies, and is then removed."""
    refuses_streamed_lists: int | None = None
    """Status with which streamed lists are refused, as by a server without the feature."""
    lists: int = 0
    """LISTs in pages, and streamed lists, that the server has begun."""
    streamed_lists: int = 0
    watches: int = 0
    url: str = ""
    tokens: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queues: list[asyncio.Queue[dict[str, Any] | None]] = []
        self._runner: web.AppRunner | None = None
        self.api.on_event = self._send

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def open_watches(self) -> int:
        """The number of watches that get events."""
        return len(self._queues)

    def get(self, name: str) -> Raw:
        """Return the object as the server has it now. Changes to it send no event."""
        return self.api.objects[PLURAL, "", name]

    def all(self) -> dict[str, Raw]:
        return {raw["metadata"]["name"]: raw for raw in self.api.all(PLURAL)}

    def put(self, name: str, value: int) -> None:
        """Create or change an object."""
        self.api.put(PLURAL, {"metadata": {"name": name}, "spec": {"value": value}})

    def remove(self, name: str) -> None:
        self.api.remove(PLURAL, "", name)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Keep the events of changes from the open watches, as a gap does."""
        queues, self._queues = self._queues, []
        yield
        self._queues = queues

    def send(self, name: str) -> None:
        """Send the event of an object as it is now to open watches."""
        self._send("MODIFIED", self.get(name))

    def bookmark(self, *, ends_list: bool = False) -> None:
        self._send("BOOKMARK", self._bookmark(ends_list=ends_list))

    def end_watches(self) -> None:
        """End every stream cleanly."""
        for queue in self._queues:
            queue.put_nowait(None)

    def _send(self, kind: str, body: dict[str, Any]) -> None:
        for queue in self._queues:
            queue.put_nowait({"type": kind, "object": json.loads(json.dumps(body))})

    def _take(self, *kinds: Fault) -> Fault | None:
        for fault in self.faults:
            if fault in kinds:
                self.faults.remove(fault)
                return fault
        return None

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        fault = self._take(*_STATUSES)
        if fault is not None:
            code = _STATUSES[fault]
            return web.json_response({"reason": fault, "message": "no"}, status=code)
        if request.query.get("watch"):
            return await self._watch(request)
        return self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        start = int(request.query.get("continue", "0"))
        if start and self._take(Fault.EXPIRED_CONTINUE):
            return web.json_response({"reason": "Expired", "message": "too old"}, status=410)
        self.lists += start == 0
        stop = start + int(request.query.get("limit", "500"))
        items = self.api.all(PLURAL)
        metadata = {"resourceVersion": self.api.version}
        if stop < len(items):
            metadata["continue"] = str(stop)
        return web.json_response({"metadata": metadata, "items": items[start:stop]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        with_list = "sendInitialEvents" in request.query
        if with_list and self.refuses_streamed_lists:
            message = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
            return web.json_response(
                {"reason": "Invalid", "message": message}, status=self.refuses_streamed_lists
            )
        if self._take(Fault.GONE):
            return web.json_response({"reason": "Expired", "message": "too old"}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        if self._take(Fault.SILENT):
            await asyncio.Event().wait()
        for line in self._bad_lines():
            await response.write(line)
            return response
        if self._take(Fault.RESET):
            await response.write(b'{"type": "ADD')
            if request.transport is not None:
                request.transport.abort()
            return response
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        first = list(
            self._present() if with_list else self._after(int(request.query["resourceVersion"]))
        )
        if with_list:
            self.lists += 1
            self.streamed_lists += 1
            if self._take(Fault.NO_BOOKMARK):
                first.pop()
            if self._take(Fault.CUT_LIST):
                await response.write(json.dumps(first[0]).encode() + b"\n")
                return response
        self._queues.append(queue)
        try:
            for present in first:
                await response.write(json.dumps(present).encode() + b"\n")
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._queues.remove(queue)
        return response

    def _present(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed list, with the bookmark that marks its end."""
        for body in self.api.all(PLURAL):
            yield {"type": "ADDED", "object": body}
        yield {"type": "BOOKMARK", "object": self._bookmark(ends_list=True)}

    def _bookmark(self, *, ends_list: bool) -> dict[str, Any]:
        metadata: dict[str, Any] = {"resourceVersion": self.api.version}
        if ends_list:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        return {"metadata": metadata}

    def _after(self, version: int) -> Iterator[dict[str, Any]]:
        """Yield events for the objects that changed after `version`.

        Deletions in the gap are not reported, as after compaction.
        """
        for body in self.api.all(PLURAL):
            if int(body["metadata"]["resourceVersion"]) > version:
                yield {"type": "MODIFIED", "object": body}

    def _bad_lines(self) -> Iterator[bytes]:
        for fault, code in ((Fault.ERROR_EVENT, 500), (Fault.GONE_EVENT, 410)):
            if self._take(fault):
                error = {"code": code, "reason": "Injected", "message": "injected"}
                yield json.dumps({"type": "ERROR", "object": error}).encode() + b"\n"
        if self._take(Fault.GARBAGE):
            yield b"<html>\n"
