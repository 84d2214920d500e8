"""The control server: HTTPS with mutual TLS, and the plain one for kubelet and Prometheus.

It authenticates (who does the certificate name), parses, asks `rounds.refuse`, and hands on; it
decides nothing itself. Up before the first ROUND: reads are served in any state.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from holdfast_core.contract import operator_dns_name
from holdfast_core.errors import (
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
)
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.transfer.codec import MAX_CONTROL_BYTES, dumps, loads
from holdfast_core.transfer.messages import (
    CoordinatorState,
    Inventory,
    ManifestDocument,
    Refusal,
    Rendezvous,
)
from holdfast_sidecar import logs
from holdfast_sidecar.rounds import OPERATOR, Caller, RoundState
from holdfast_sidecar.verbs import POSTS, Endpoint

MAX_POLL_SECONDS = 60.0
_SMALL_BODY_BYTES = 4 << 20
"""Everything but manifests and layouts: bounded before it is parsed."""


class Handler(Protocol):
    """What the server hands requests to. All raise RefusedError, StaleRoundError, NotFoundError."""

    @property
    def state(self) -> RoundState: ...

    async def dispatch(self, caller: Caller, path: str, message: Any) -> Any: ...

    async def inventory(self) -> Inventory: ...

    async def coordinator_state(
        self, caller: Caller, since: int, timeout_seconds: float
    ) -> CoordinatorState: ...

    async def rendezvous(self, round_: RestartRound, timeout_seconds: float) -> Rendezvous: ...

    async def manifest(
        self, job_uid: JobUid | None, checkpoint: CheckpointId
    ) -> ManifestDocument: ...

    def metrics(self) -> bytes: ...


def caller_of(names: tuple[str, ...], job_uid: str) -> Caller | None:
    """Who a certificate's dNSNames speak for in this job; None for a stranger."""
    if operator_dns_name(job_uid) in names:
        return OPERATOR
    suffix = f".{job_uid}.holdfast"
    for name in names:
        pod = name.removesuffix(suffix)
        if pod and pod != name:
            return Caller(pod)
    return None


def _dns_names(request: web.Request) -> tuple[str, ...]:
    transport = request.transport
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    if not certificate:
        return ()
    return tuple(v for kind, v in certificate.get("subjectAltName", ()) if kind == "DNS")


class ControlServer:
    """Serves `handler` on the control port."""

    def __init__(self, handler: Handler, job_uid: str, context: ssl.SSLContext) -> None:
        self._handler = handler
        self._job_uid = job_uid
        self._context = context
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port bound (it was chosen where `port` is 0)."""
        app = web.Application(client_max_size=MAX_CONTROL_BYTES)
        for endpoint in POSTS:
            app.router.add_post(endpoint.path, self._post(endpoint))
        for path, get in (
            ("/v1/inventory", self._inventory),
            ("/v1/state", self._state),
            ("/v1/rendezvous", self._rendezvous),
            ("/v1/manifest", self._manifest),
        ):
            app.router.add_get(path, self._guarded(get))
        self._runner, bound = await _serve(app, host, port, self._context)
        return bound

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _post(self, endpoint: Endpoint) -> Callable[[web.Request], Awaitable[web.Response]]:
        limit = MAX_CONTROL_BYTES if endpoint.path == "/v1/manifest" else _SMALL_BODY_BYTES

        async def handle(request: web.Request, caller: Caller) -> Any:
            if (request.content_length or 0) > limit:
                raise FormatError(
                    f"{endpoint.path}: {request.content_length} bytes, at most {limit}"
                )
            message = loads(endpoint.request, await request.read(), limit_bytes=limit)
            return await self._handler.dispatch(caller, endpoint.path, message)

        return self._guarded(handle)

    def _guarded(
        self, handle: Callable[[web.Request, Caller], Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def respond(request: web.Request) -> web.Response:
            caller = caller_of(_dns_names(request), self._job_uid)
            state = self._handler.state
            if caller is None:
                return _json(
                    409,
                    state.refused(
                        Refusal.NOT_MEMBER, f"the certificate names nobody of job {self._job_uid}"
                    ),
                )
            try:
                return _json(200, await handle(request, caller))
            except StaleRoundError as error:
                return _json(409, state.refused(Refusal.STALE_ROUND, str(error)))
            except RefusedError as error:
                return _json(409, state.refused(Refusal(error.code), str(error)))
            except NotFoundError as error:
                return _json(409, state.refused(Refusal.NOT_FOUND, str(error)))
            except FormatError as error:
                return _json(400, state.refused(Refusal.BAD_REQUEST, str(error)))
            except HoldfastError as error:
                logs.failure(f"{request.method} {request.path} failed", error)
                return _json(503, state.refused(Refusal.BUSY, str(error)))

        return respond

    async def _inventory(self, request: web.Request, caller: Caller) -> Inventory:
        return await self._handler.inventory()

    async def _state(self, request: web.Request, caller: Caller) -> CoordinatorState:
        return await self._handler.coordinator_state(
            caller, _number(request, "since", 0), _timeout(request)
        )

    async def _rendezvous(self, request: web.Request, caller: Caller) -> Rendezvous:
        return await self._handler.rendezvous(
            RestartRound(_number(request, "round", None)), _timeout(request)
        )

    async def _manifest(self, request: web.Request, caller: Caller) -> ManifestDocument:
        job_uid = request.query.get("jobUid")
        return await self._handler.manifest(
            JobUid(job_uid) if job_uid else None,
            CheckpointId(
                Step(_number(request, "step", None)), RestartRound(_number(request, "round", None))
            ),
        )


class PlainServer:
    """/healthz and /metrics without TLS: neither the kubelet nor Prometheus has a certificate.
    Neither changes any state."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        async def healthz(request: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(
                body=self._handler.metrics(),
                headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
            )

        app = web.Application(client_max_size=1024)
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/metrics", metrics)
        self._runner, bound = await _serve(app, host, port, None)
        return bound

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


async def _serve(
    app: web.Application, host: str, port: int, context: ssl.SSLContext | None
) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port, ssl_context=context, reuse_address=True)
    await site.start()
    address = runner.addresses[0]
    return runner, int(address[1])


def _json(status: int, message: Any) -> web.Response:
    return web.Response(status=status, body=dumps(message), content_type="application/json")


def _number(request: web.Request, name: str, default: int | None) -> int:
    text = request.query.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or len(text) > 18:
        raise FormatError(f"{request.path}: {name}={text!r}: expected a whole number >= 0")
    return int(text)


def _timeout(request: web.Request) -> float:
    return min(float(_number(request, "timeout", 0)), MAX_POLL_SECONDS)
