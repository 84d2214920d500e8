"""One TLS server that answers for the sidecars of thousands of pods.

Every address in 127.0.0.0/8 belongs to this machine, so each pod has its own. The server listens on all of
them. The name that the operator expects (SNI) chooses the certificate, and the address that it called chooses
the sidecar.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from tests.support.operator.served_sidecar import server_context

from benchmarks.scale.gangs import GangSidecar
from holdfast_core.contract import CONTROL_PORT
from holdfast_operator.sidecars.certificates import KeyPair

_CONTEXTS = 4096
"""TLS contexts that are kept. One takes some 40 KiB."""


@dataclass(frozen=True, slots=True)
class Credentials:
    authority: str
    """PEM of ca.crt."""
    leaf: KeyPair


class Listener:
    """The control ports of all played pods. Usable between `start` and `close`.

    Args:
        called: Receives the sidecar and the path of each request before it is answered.
    """

    def __init__(self, called: Callable[[GangSidecar, str], None]) -> None:
        self._called = called
        self._by_address: dict[str, GangSidecar] = {}
        self._credentials: dict[str, Credentials] = {}
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self.handshakes = 0

    async def start(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.sni_callback = self._choose
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "0.0.0.0", CONTROL_PORT, ssl_context=context, backlog=4096)
        await site.start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def add(self, address: str, name: str, sidecar: GangSidecar, credentials: Credentials) -> None:
        """Answer at this address, with a certificate for this DNS name."""
        self._by_address[address] = sidecar
        self._credentials[name] = credentials

    def remove(self, address: str, name: str) -> None:
        """Drop every request to this address from now on."""
        self._by_address.pop(address, None)
        self._credentials.pop(name, None)
        self._contexts.pop(name, None)

    def silence(self, address: str) -> None:
        """Answer nothing at this address, and end its connections at their next request."""
        self._by_address[address].silent = True

    def answer_again(self, address: str) -> None:
        self._by_address[address].silent = False

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        self.handshakes += 1
        credentials = self._credentials.get(name or "")
        if name is None or credentials is None:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        context = self._contexts.pop(name, None)
        if context is None:
            context = server_context(credentials.authority, credentials.leaf)
        self._contexts[name] = context
        if len(self._contexts) > _CONTEXTS:
            self._contexts.popitem(last=False)
        connection.context = context
        return None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        address = None if transport is None else transport.get_extra_info("sockname")[0]
        sidecar = self._by_address.get(address or "")
        if sidecar is None or sidecar.silent:
            if transport is not None:
                transport.abort()
            return web.Response(status=503)
        self._called(sidecar, request.path)
        handler = sidecar.handlers().get((request.method, request.path))
        response = web.Response(status=404) if handler is None else await handler(request)
        if sidecar.silent and transport is not None:
            transport.abort()  # the reply to a poll that began earlier is lost, too
        return response
