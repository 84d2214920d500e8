"""The control server (HTTPS with mutual TLS), and the plain server for the kubelet and Prometheus.

The operator follows the coordinator's state by a version number with a long poll. An urgent change raises
the version immediately. Other changes are bundled. They raise it at most once in the time that the operator
chooses, because an operator of a thousand jobs cannot follow each of them closely. The operator can
acknowledge only versions that this instance has delivered. A number from an earlier instance, which may be
higher, acknowledges nothing.

The control server authenticates the caller by its certificate and checks with `base.rounds` whether the
caller may send this type of message. Only then does it read and parse the body and pass the message to its
handler. It serves before the first ROUND, but only the operator.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

from aiohttp import web

from holdfast_core import logs
from holdfast_core.clock import Clock, SystemClock
from holdfast_core.errors import (
    FormatError,
    HoldfastError,
    RefusedError,
)
from holdfast_core.format.canonical import PREFIX, parse_digest
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Step
from holdfast_core.messages.codec import body_limit_bytes, dumps, loads
from holdfast_core.messages.common import raise_refused, refusal_of
from holdfast_core.messages.schema import (
    CoordinatorState,
    Inventory,
    Plan,
    Refusal,
    StoreAddress,
)
from holdfast_core.net import ListenerLimits, Port, dns_names, operator_dns_name
from holdfast_sidecar.base.rounds import OPERATOR, Caller, RoundState, refuse_caller
from holdfast_sidecar.wire.bodies import Bodies, BodyLimits, ClosedConnections, in_pieces
from holdfast_sidecar.wire.verbs import POSTS, ROUND_HEADER, Route

BUNDLE_SECONDS = 1.0
"""Shortest time for which changes that are not urgent are bundled."""


class Versioned:
    """Version number that grows with each change and that callers can wait for."""

    def __init__(self) -> None:
        self.version = 1
        self._delivered = 0
        self._acknowledged = 0
        self._changed = asyncio.Event()
        self._ticked = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._bundle_seconds = BUNDLE_SECONDS
        self._closed = False

    def bump(self, *, urgent: bool) -> int:
        """Record a change and return the present version.

        Args:
            urgent: Raise the version now, so that the returned version includes the change. Otherwise it is
                raised within the time of `bundle_for`.
        """
        self.tick()
        if urgent:
            self._raise()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(self._bundle_seconds, self._raise)
        return self.version

    def bundle_for(self, seconds: float) -> None:
        """Bundle changes that are not urgent for this time, at least BUNDLE_SECONDS, from the next one on."""
        self._bundle_seconds = max(BUNDLE_SECONDS, seconds)

    def tick(self) -> None:
        """Wake the loops that wait in `wait_tick`, without a new version."""
        self._ticked.set()

    def close(self) -> None:
        """End all waits for a newer version."""
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        self._changed.set()

    def _raise(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def acknowledge(self, since: int) -> None:
        """Record that the caller has acted on all versions up to `since`, if they were delivered."""
        if since <= self._delivered:
            self._acknowledged = max(self._acknowledged, since)
        elif since >= self.version:
            # The number is from an earlier instance. Without a version above it, the caller would wait
            # forever.
            self.version = since
            self._raise()

    def delivered(self, version: int) -> None:
        """Record that a state of this version was sent to the caller."""
        self._delivered = max(self._delivered, version)

    def acknowledged(self, version: int) -> bool:
        """Return whether the caller has acknowledged this version or a higher one."""
        return self._acknowledged >= version

    async def wait_above(self, since: int, timeout_seconds: float) -> None:
        """Wait until the version is above `since`, `close` is called, or the time is over."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.version <= since and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            return

    async def wait_tick(self, at_most_seconds: float = 60.0) -> None:
        """Wait until the next change, but no longer than `at_most_seconds`.

        A change that one waiter has consumed does not wake another one that begins to wait later, so each
        loop also looks again after this time.
        """
        waiter = self._ticked
        try:
            async with asyncio.timeout(at_most_seconds):
                await waiter.wait()
        except TimeoutError:
            return
        if self._ticked is waiter:
            self._ticked = asyncio.Event()


MAX_POLL_SECONDS = 60.0
_LAYOUTS_AT_ONCE = 4
"""Number of layouts, of up to 64 MiB each, that are read and sent at the same time, at most half of them to
one caller."""
_DOCUMENT_SECONDS = 60.0
"""Time-out for a caller to receive a layout or a manifest."""
_OFF_LOOP_BYTES = 256 << 10
"""Bodies of at least this size are parsed in a thread."""
_IDLE_SECONDS = 330.0
"""Time-out between two requests of a connection, and for the head of a request. Only callers with a
certificate of this job come so far."""
_PLAIN_IDLE_SECONDS = 5.0
_MAX_QUIET_SECONDS = 600.0
"""Longest time for which the operator may ask for urgent changes only."""
_MAX_WAIT_SECONDS = 600
"""Longest time for which a readiness probe may wait for the first training."""
_LOOK_SECONDS = 0.1
"""Pause of a waiting probe between two looks at the ranks."""
_RENDERED_SECONDS = 0.2
"""Seconds for which one rendering of /metrics is reused, because anyone may request it at any rate. A request
that waited for a newer one could lose its connection to others meanwhile."""


class Handler(Protocol):
    """Handler of the servers' requests.

    The asynchronous methods raise RefusedError, StaleRoundError or NotFoundError to refuse a request.
    """

    @property
    def state(self) -> RoundState: ...

    async def dispatch(self, caller: Caller, path: str, message: Any) -> Any: ...

    async def inventory(self, caller: Caller) -> Inventory: ...

    async def coordinator_state(
        self, caller: Caller, since: int, timeout_seconds: float, quiet_seconds: float
    ) -> CoordinatorState: ...

    async def rendezvous(
        self, caller: Caller, round_: RestartRound, timeout_seconds: float
    ) -> StoreAddress: ...

    async def plan(
        self,
        caller: Caller,
        round_: RestartRound,
        coordinator: str,
        since: int,
        timeout_seconds: float,
    ) -> Plan: ...

    async def manifest(
        self,
        caller: Caller,
        job_uid: JobUid | None,
        checkpoint: CheckpointId,
    ) -> bytes: ...

    async def layout(self, caller: Caller, digest: Digest) -> bytes: ...


def caller_of(names: tuple[str, ...], job_uid: str) -> Caller | None:
    """Return the caller that a certificate's dNSNames name in this job, or None if they name none."""
    if operator_dns_name(job_uid) in names:
        return OPERATOR
    suffix = f".{job_uid}.holdfast"
    for name in names:
        pod = name.removesuffix(suffix)
        if pod and pod != name:
            return Caller(pod)
    return None


class ControlServer:
    """Server of the control port, which passes requests to a `Handler`."""

    def __init__(
        self,
        handler: Handler,
        job_uid: str,
        context: ssl.SSLContext,
        *,
        limits: ListenerLimits | None = None,
        bodies: BodyLimits | None = None,
        dropped: Callable[[str, str], None] = lambda port, reason: None,
    ) -> None:
        """Create the server; `start` begins to serve.

        Args:
            limits, bodies: Limits other than the usual ones.
            dropped: Called with the port's name and the reason for each connection that the server closes
                before its end.
        """
        self._handler = handler
        self._job_uid = job_uid
        self._bodies = Bodies(bodies or BodyLimits())
        self._layouts = asyncio.Semaphore(_LAYOUTS_AT_ONCE)
        self._layouts_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._port = Port(
            context=context,
            limits=limits,
            idle_seconds=_IDLE_SECONDS,
            closed=ClosedConnections("control", dropped),
        )

    async def start(self, host: str, port: int) -> int:
        """Start to serve. Return the port, which is chosen by the system if `port` is 0."""
        app = web.Application()
        for endpoint in POSTS:
            app.router.add_post(endpoint.path, self._post(endpoint))
        for path, get in (
            ("/v1/inventory", self._inventory),
            ("/v1/state", self._state),
            ("/v1/rendezvous", self._rendezvous),
            ("/v1/plan", self._plan),
            ("/v1/manifest", self._manifest),
            ("/v1/layout", self._layout),
        ):
            app.router.add_get(path, self._guarded(get))
        return await self._port.start(app, host, port)

    @property
    def connections(self) -> int:
        return self._port.connections

    async def close(self) -> None:
        await self._port.close()

    def _post(self, endpoint: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request, caller: Caller) -> Any:
            refused = refuse_caller(
                self._handler.state, caller, endpoint.request, _round_of_header(request)
            )
            if refused is not None:
                raise_refused(refused)
            limit = body_limit_bytes(endpoint.request)
            async with self._bodies.read(request, caller, limit) as body:
                if len(body) < _OFF_LOOP_BYTES:
                    message = loads(endpoint.request, body)
                else:
                    message = await asyncio.to_thread(loads, endpoint.request, body)
            return await self._handler.dispatch(caller, endpoint.path, message)

        return self._guarded(handle)

    def _guarded(
        self, handle: Callable[[web.Request, Caller], Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def respond(request: web.Request) -> web.StreamResponse:
            caller = caller_of(dns_names(request.transport), self._job_uid)
            state = self._handler.state
            if caller is None:
                return _json(
                    409,
                    state.refused(
                        Refusal.NOT_MEMBER,
                        (
                            "the certificate is not of the operator or of a "
                            f"worker of job {self._job_uid}"
                        ),
                    ),
                )
            try:
                answer = await handle(request, caller)
            except HoldfastError as error:
                code = refusal_of(error)
                if code is Refusal.BUSY and not isinstance(error, RefusedError):
                    logs.failure(f"{request.method} {request.path} failed", error)
                    return _json(503, state.refused(code, str(error)))
                status = 400 if code is Refusal.BAD_REQUEST else 409
                return _json(status, state.refused(code, str(error)))
            return answer if isinstance(answer, web.StreamResponse) else _json(200, answer)

        return respond

    async def _inventory(self, request: web.Request, caller: Caller) -> Inventory:
        return await self._handler.inventory(caller)

    async def _state(self, request: web.Request, caller: Caller) -> CoordinatorState:
        return await self._handler.coordinator_state(
            caller,
            _number(request, "since", 0),
            _timeout(request),
            min(float(_number(request, "quiet", 0)), _MAX_QUIET_SECONDS),
        )

    async def _rendezvous(self, request: web.Request, caller: Caller) -> StoreAddress:
        return await self._handler.rendezvous(
            caller, RestartRound(_number(request, "round", None)), _timeout(request)
        )

    async def _plan(self, request: web.Request, caller: Caller) -> Plan:
        return await self._handler.plan(
            caller,
            RestartRound(_number(request, "round", None)),
            request.query.get("coordinator", ""),
            _number(request, "since", 0),
            _timeout(request),
        )

    async def _manifest(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """Send a manifest as it is stored. As a text in a message it would be longer."""
        job_uid = request.query.get("jobUid")
        checkpoint = CheckpointId(
            Step(_number(request, "step", None)), RestartRound(_number(request, "round", None))
        )
        document = await self._handler.manifest(
            caller, JobUid(job_uid) if job_uid else None, checkpoint
        )
        return await _sent(request, caller, document)

    async def _layout(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """Send a layout as it is stored. As a part of a message it would be twice as long."""
        digest = parse_digest(f"{PREFIX}{request.query.get('digest', '')}", request.path)
        share = self._layouts_of.setdefault(caller.pod, asyncio.Semaphore(_LAYOUTS_AT_ONCE // 2))
        async with share, self._layouts:
            return await _sent(request, caller, await self._handler.layout(caller, digest))


class PlainServer:
    """Server of /healthz, /readyz and /metrics without TLS: kubelet and Prometheus have no certificate.

    No path changes any state.
    """

    def __init__(
        self,
        render: Callable[[], bytes],
        ready: Callable[[], bool],
        *,
        dropped: Callable[[str, str], None] = lambda port, reason: None,
        clock: Clock | None = None,
    ) -> None:
        """Create the server; `start` begins to serve.

        Args:
            render: Returns the page /metrics.
            ready: Whether the ranks of this pod train: /readyz answers 200, and not 503.
            dropped: Called with port and reason for each connection that is dropped.
            clock: Measures the age of a rendering.
        """
        self._render_page = render
        self._ready = ready
        self._clock = clock or SystemClock()
        self._rendered: tuple[float, bytes] | None = None
        self._has_trained = False
        """Whether a probe has found that the ranks train, in the life of this process."""
        self._is_closing = False
        self._port = Port(
            context=None,
            idle_seconds=_PLAIN_IDLE_SECONDS,
            closed=ClosedConnections("metrics", dropped),
        )

    async def start(self, host: str, port: int) -> int:
        async def healthz(request: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        async def readyz(request: web.Request) -> web.Response:
            try:
                wait_seconds = _number(request, "wait", 0)
            except FormatError as error:
                return web.Response(status=400, text=f"{error}\n")
            if await self._trains(request, wait_seconds):
                return web.Response(text="ok\n")
            return web.Response(status=503, text="the ranks of this pod do not train\n")

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(
                body=self._metrics(),
                headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
            )

        app = web.Application(client_max_size=1024)
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/readyz", readyz)
        app.router.add_get("/metrics", metrics)
        return await self._port.start(app, host, port)

    @property
    def connections(self) -> int:
        return self._port.connections

    async def close(self) -> None:
        self._is_closing = True  # the end of the server waits for the probes
        await self._port.close()

    async def _trains(self, request: web.Request, wait_seconds: int) -> bool:
        """Return whether the ranks train. Wait for the first time that they do, at most `wait_seconds`.

        Later the pod must stop being ready at once, because the PodDisruptionBudget counts ready pods.
        """
        until = self._clock.monotonic() + min(wait_seconds, _MAX_WAIT_SECONDS)
        while not (trains := self._ready()) and not self._has_trained:
            left = request.transport is None or request.transport.is_closing()
            if left or self._is_closing or self._clock.monotonic() >= until:
                return False
            await self._clock.sleep(_LOOK_SECONDS)
        self._has_trained = True
        return trains

    def _metrics(self) -> bytes:
        now = self._clock.monotonic()
        if self._rendered is None or now >= self._rendered[0] + _RENDERED_SECONDS:
            self._rendered = now, self._render_page()
        return self._rendered[1]


async def _sent(request: web.Request, caller: Caller, document: bytes) -> web.StreamResponse:
    """Send a document in pieces, each when the caller has read the ones before.

    TLS would hold a copy of a whole document for each caller.
    """
    response = web.StreamResponse()
    response.content_length = len(document)
    try:
        async with asyncio.timeout(_DOCUMENT_SECONDS):
            await response.prepare(request)
            for piece in in_pieces(document):
                await response.write(piece)
                await asyncio.sleep(0)  # the event loop encrypts 13 MB in 44 ms
            await response.write_eof()
    except TimeoutError:
        logs.warning("a document was not received in time", caller=caller.pod, path=request.path)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # The caller has left. aiohttp would log this as an error of the server.
    return response


def _round_of_header(request: web.Request) -> RestartRound | None:
    text = request.headers.get(ROUND_HEADER)
    if text is None:
        return None
    if not text.isdecimal() or not text.isascii() or len(text) > 18:
        raise FormatError(f"{ROUND_HEADER}: {text[:40]!r}: expected a whole number >= 0")
    return RestartRound(int(text))


def _json(status: int, message: Any) -> web.Response:
    body = _encode_plan(message) if isinstance(message, Plan) else dumps(message)
    return web.Response(status=status, body=body, content_type="application/json")


@lru_cache(maxsize=4)
def _encode_plan(plan: Plan) -> bytes:
    """Return the body of a plan, which goes to many workers."""
    return dumps(plan)


def _number(request: web.Request, name: str, default: int | None) -> int:
    text = request.query.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or len(text) > 18:
        raise FormatError(f"{request.path}: {name}={text!r}: expected a whole number >= 0")
    return int(text)


def _timeout(request: web.Request) -> float:
    return min(float(_number(request, "timeout", 0)), MAX_POLL_SECONDS)
