"""HTTPS proxy between the operator and the real API server, with faults by rule.

Without a rule it passes everything on unchanged. Rules hit requests and replies; open watches are frozen,
cut or written to directly. `writes` records each write that the API server answered, in order.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import yaml
from aiohttp import web
from tests.support.hang import HANG_SECONDS
from tests.support.servers.control_plane import ControlPlane
from tests.support.servers.ports import free_port

from holdfast_operator.model import labels

T = TypeVar("T")

_PASSED_ON = ("Authorization", "Content-Type", "Accept", "User-Agent")


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the operator."""

    verb: str
    """The server's verb: get, list, watch, post, patch, put or delete."""
    plural: str
    namespace: str
    name: str
    part: str
    """Subresource, such as status."""
    page: str
    """The `continue` of a LIST."""
    selector: str
    streams_list: bool
    """Whether it is a watch that begins with all present objects."""
    dry_run: bool

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list", "watch")


def read_call(request: web.Request) -> Call:
    parts = request.path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    plural, name, part = (*rest[:3], "", "", "")[:3]
    verb = request.method.lower()
    if verb == "get" and not name:
        verb = "watch" if request.query.get("watch") else "list"
    page, selector = (request.query.get(key, "") for key in ("continue", "labelSelector"))
    streams_list, dry_run = (key in request.query for key in ("sendInitialEvents", "dryRun"))
    return Call(verb, plural, namespace, name, part, page, selector, streams_list, dry_run)


Matches = Callable[[Call], bool]


def everything(call: Call) -> bool:
    return True


def watches(*plurals: str) -> Matches:
    """Match watches of these collections, or all watches."""
    return lambda call: call.verb == "watch" and (not plurals or call.plural in plurals)


def streamed_lists(*plurals: str) -> Matches:
    """Match watches of these collections, or all, that begin with the present objects."""
    return lambda call: call.streams_list and (not plurals or call.plural in plurals)


def lists_of_workers(call: Call) -> bool:
    """Match LISTs of the pods that the operator created, and not those of adopted pods."""
    ours = f"{labels.MANAGED_BY}={labels.MANAGED_BY_VALUE}"
    return call.verb == "list" and call.plural == "pods" and call.selector == ours


def status_writes(call: Call) -> bool:
    return call.verb == "patch" and call.part == "status"


def writes(call: Call) -> bool:
    """Match all writes except those of the lease, which come at any time."""
    return call.writes and call.plural != "leases"


# ---------------------------------------------------------------------- faults


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer with this status instead of passing the request on."""

    status: int
    reason: str = ""
    retry_after: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset the connection instead of passing the request on."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Accept the request, and never answer. The connection ends when the rule is removed."""


@dataclass(slots=True)
class Hold:
    """Call `then`, and pass the request on when the rule is removed, even if the caller is gone by then."""

    then: Callable[[], None] = lambda: None


@dataclass(slots=True)
class LoseReply:
    """Pass the request on, call `then`, and reset the connection instead of answering."""

    then: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Edit:
    """Answer with the server's JSON as `change` returns it."""

    change: Callable[[dict[str, Any]], dict[str, Any]]


Fault = Refuse | Reset | Silence | Hold | LoseReply | Edit


@dataclass(slots=True, eq=False)
class Rule:
    matches: Matches
    fault: Fault
    skip: int = 0
    """Number of matching requests that are passed on first."""
    times: int | None = None
    """Number of requests to hit; None for all until the rule is removed."""
    hits: list[Call] = field(default_factory=list)
    removed: asyncio.Event = field(default_factory=asyncio.Event)

    def takes(self, call: Call) -> bool:
        if not self.matches(call) or (self.times is not None and len(self.hits) >= self.times):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.hits.append(call)
        return True


@dataclass(frozen=True, slots=True)
class Write:
    """A write that the API server answered."""

    call: Call
    agent: str
    body: dict[str, Any]
    status: int
    reply: dict[str, Any]


@dataclass(slots=True, eq=False)
class Stream:
    """One open watch."""

    call: Call
    frozen: bool = False
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """Lines for the operator; None ends the stream."""


class ApiProxy:
    """The proxy, as `with ApiProxy(plane) as proxy:`. Every method may be called from the test's thread."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.port = free_port()
        self.rules: list[Rule] = []
        self.streams: list[Stream] = []
        self.writes: list[Write] = []
        self.replays = False
        """Whether each event of a watch comes twice."""
        self.hidden: set[str] = set()
        """Names of objects whose events are left out, as by a server that is behind."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        self.heal()
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def write_kubeconfig(self, like: Path, path: Path) -> None:
        """Write a kubeconfig that leads through this proxy, with the user of the other kubeconfig."""
        config = yaml.safe_load(like.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.port}"
        path.write_text(json.dumps(config))

    # ------------------------------------------------------------------ faults

    def add(
        self,
        fault: Fault,
        matches: Matches = everything,
        *,
        skip: int = 0,
        times: int | None = None,
    ) -> Rule:
        """Let `fault` hit the requests that match. Of several rules the first one counts."""
        rule = Rule(matches, fault, skip, times)
        self._run(self._change(self.rules.append, rule))
        return rule

    def remove(self, rule: Rule) -> None:
        """End the rule. Requests that it holds back are let go."""

        def end(rule: Rule) -> None:
            if rule in self.rules:
                self.rules.remove(rule)
            rule.removed.set()

        self._run(self._change(end, rule))

    def heal(self) -> None:
        """Remove all rules."""
        for rule in list(self.rules):
            self.remove(rule)

    def freeze_watches(self, matches: Matches = everything) -> int:
        """Let the open watches stay open and silent for ever, as half-open connections are."""

        def freeze(stream: Stream) -> None:
            stream.frozen = True

        return self._each_stream(matches, freeze)

    def cut_watches(self, matches: Matches = everything) -> int:
        """End the open watches."""
        return self._each_stream(matches, lambda stream: stream.lines.put_nowait(None))

    def open_watches(self, matches: Matches = everything) -> int:
        """Return the number of open watches."""
        return self._each_stream(matches, lambda stream: None)

    def send_to_watches(self, event: dict[str, Any], matches: Matches = everything) -> int:
        """Send an event into the open watches."""
        line = json.dumps(event).encode() + b"\n"
        return self._each_stream(matches, lambda stream: stream.lines.put_nowait(line))

    def close_port(self) -> None:
        """Refuse connections, and reset those that are open."""
        self._run(self._stop_serving())

    def open_port(self) -> None:
        self._run(self._serve())

    def _each_stream(self, matches: Matches, do: Callable[[Stream], None]) -> int:
        async def each() -> int:
            found = [s for s in self.streams if matches(s.call)]
            for stream in found:
                do(stream)
            return len(found)

        return self._run(each())

    # ------------------------------------------------------------------ the server

    async def _start(self) -> None:
        authority = ssl.create_default_context(cafile=str(self._plane.dir / "ca.crt"))
        connector = aiohttp.TCPConnector(ssl=authority, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
        )
        await self._serve()

    async def _serve(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._plane.dir / "server.crt", self._plane.dir / "server.key")
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context).start()

    async def _stop_serving(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for stream in self.streams:
            stream.lines.put_nowait(None)
        await runner.cleanup()

    async def _close(self) -> None:
        await self._stop_serving()
        assert self._session is not None
        await self._session.close()
        others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        call, body = read_call(request), await request.read()
        fault = next((r for r in list(self.rules) if r.takes(call)), None)
        match fault.fault if fault is not None else None:
            case Refuse(status, reason, retry_after):
                headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
                said = {"kind": "Status", "reason": reason, "message": "a fault of the test"}
                return web.json_response({**said, "code": status}, status=status, headers=headers)
            case Reset():
                return _reset(request)
            case Silence():
                assert fault is not None
                await fault.removed.wait()
                return _reset(request)
            case Hold(then):
                assert fault is not None
                # A task of its own: the server ends the handler when its caller is gone.
                late = asyncio.create_task(self._late(fault, request, call, body))
                then()
                return await asyncio.shield(late)
            case LoseReply(then):
                await self._forward(request, call, body, None)
                then()
                return _reset(request)
            case Edit(change):
                return await self._forward(request, call, body, change)
            case None:
                return await self._forward(request, call, body, None)

    async def _late(
        self, rule: Rule, request: web.Request, call: Call, body: bytes
    ) -> web.StreamResponse:
        await rule.removed.wait()
        return await self._forward(request, call, body, None)

    async def _forward(
        self,
        request: web.Request,
        call: Call,
        body: bytes,
        change: Callable[[dict[str, Any]], dict[str, Any]] | None,
    ) -> web.StreamResponse:
        assert self._session is not None
        headers = {k: request.headers[k] for k in _PASSED_ON if k in request.headers}
        url = self._plane.url + request.path_qs
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers
            ) as reply:
                if call.verb == "watch" and reply.status == 200:
                    return await self._stream(request, call, reply)
                data = await reply.read()
        except (aiohttp.ClientError, OSError):
            return _reset(request)
        if call.writes:
            agent = headers.get("User-Agent", "")
            self.writes.append(Write(call, agent, _json(body), reply.status, _json(data)))
        if change is not None and reply.status == 200:
            data = json.dumps(change(json.loads(data))).encode()
        answer = {k: reply.headers[k] for k in ("Content-Type",) if k in reply.headers}
        return web.Response(body=data, status=reply.status, headers=answer)

    async def _stream(
        self, request: web.Request, call: Call, reply: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": reply.headers["Content-Type"]})
        await answer.prepare(request)
        stream = Stream(call)
        self.streams.append(stream)
        pump = asyncio.create_task(self._pump(stream, reply))
        try:
            while (line := await stream.lines.get()) is not None:
                await answer.write(line)
        except (ConnectionError, OSError):
            pass  # the operator has closed the watch
        finally:
            self.streams.remove(stream)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        return answer

    async def _pump(self, stream: Stream, reply: aiohttp.ClientResponse) -> None:
        """Move the server's lines to the stream, until the server ends it."""
        rest = b""
        try:
            async for chunk in reply.content.iter_any():
                *found, rest = (rest + chunk).split(b"\n")
                for line in found:
                    for said in self._said(stream, line + b"\n"):
                        stream.lines.put_nowait(said)
        except (aiohttp.ClientError, OSError):
            pass  # as at the end of the stream: the operator sees that it ends
        if not stream.frozen:
            stream.lines.put_nowait(None)

    def _said(self, stream: Stream, line: bytes) -> list[bytes]:
        """Return what the operator gets for a line of the server."""
        if stream.frozen or (self.hidden and _name(line) in self.hidden):
            return []
        if not self.replays:
            return [line]
        return [line, line]

    # ------------------------------------------------------------------ parts

    async def _change(self, do: Callable[[Rule], object], rule: Rule) -> None:
        do(rule)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG_SECONDS)


def _reset(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def _name(line: bytes) -> str | None:
    """Return the name of the object of a watch's event. A bookmark has none."""
    return (json.loads(line)["object"].get("metadata") or {}).get("name")


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
