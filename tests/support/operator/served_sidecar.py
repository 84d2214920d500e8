"""Serves the sidecar of fake_sidecar.py over mutual TLS, with a gang state that the test sets.

`calls` holds the received messages. Manifests are documents, which the operator fetches and verifies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from aiohttp import web
from tests.support.operator.fake_sidecar import FakeSidecar

from holdfast_core.errors import FormatError
from holdfast_core.format.manifest import Manifest, manifest_digest, parse_manifest
from holdfast_core.ids import CheckpointId, Digest, RestartRound, Step
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import (
    CoordinatorState,
    FinishCommit,
    GangRequest,
    Inventory,
    Ok,
    Prune,
    Refusal,
    Refused,
    Round,
    Seal,
)
from holdfast_core.net import load_leaf
from holdfast_operator.model.job import ManifestView
from holdfast_operator.sidecars.certificates import KeyPair

Handler = Callable[[web.Request], Awaitable[web.Response]]


def server_context(authority: str, leaf: KeyPair) -> ssl.SSLContext:
    """Return a server's TLS context. `authority` is the PEM text of ca.crt."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    load_leaf(context, leaf.certificate, leaf.key)
    return context


class Document(NamedTuple):
    """A manifest as sidecars list it and as they send it."""

    listed: ManifestView
    content: bytes


def document_of(manifest: Manifest) -> Document:
    content = manifest.to_bytes()
    digest = manifest_digest(content)
    step, round_, shards = manifest.step, manifest.restart_round, manifest.shards
    return Document(ManifestView(step, round_, digest, manifest.world_size, shards), content)


@dataclass
class ServedSidecar(FakeSidecar):
    """Sidecar of one pod, with a port.

    Tests set `state` directly; `publish` also wakes a long poll.
    """

    documents: dict[Digest, bytes] = field(default_factory=dict)
    """The manifests that it can send."""
    state: CoordinatorState | None = None
    since: int = 0
    """The `since` of the latest poll."""
    raw_state: bytes | None = None
    """The raw body of each answer to a poll, if set."""
    refuses_state: str = ""
    """The message with which each poll is refused, if set."""
    refuses_prunes: bool = False
    raw_inventory: bytes | None = None
    raw_manifest: str | None = None
    """The document that each request for a manifest gets, if set."""
    deleted: set[int] = field(default_factory=set)
    """Steps that are listed although their manifests have been deleted meanwhile."""
    slow: dict[int, asyncio.Event] = field(default_factory=dict)
    """Steps whose manifests are sent when the event is set."""
    slow_store: asyncio.Event | None = None
    """If set, a prune ends when the event is set."""
    cuts: int = 0
    """Number of further ROUNDs whose connections it aborts instead of answering."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    handshakes: int = 0
    """TLS handshakes that clients have begun."""

    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    async def start(self, address: str, port: int, authority: str, leaf: KeyPair) -> None:
        """Listen with the leaf certificate. `authority` is the PEM text of ca.crt."""
        context = server_context(authority, leaf)
        context.sni_callback = self._count_handshake
        app = web.Application()
        for (method, path), handler in self.handlers().items():
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, port, ssl_context=context).start()

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """Return what answers each request of the protocol, by method and path."""
        return {
            ("POST", "/v1/seal"): self._seal,
            ("POST", "/v1/round"): self._round,
            ("POST", "/v1/finish-commit"): self._finish_commit,
            ("GET", "/v1/inventory"): self._inventory,
            ("GET", "/v1/manifest"): self._manifest,
            ("GET", "/v1/state"): self._state,
            ("POST", "/v1/prune"): self._prune,
            ("POST", "/v1/save-now"): self._ask,
            ("POST", "/v1/stop"): self._ask,
        }

    def _count_handshake(self, *client_hello: object) -> None:
        self.handshakes += 1

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def publish(self, state: CoordinatorState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def hold(self, *documents: Document) -> None:
        """List these manifests and no others."""
        self.manifests.clear()
        for document in documents:
            self.add(document)

    def add(self, document: Document) -> None:
        listed, content = document
        self.manifests[CheckpointId(listed.step, listed.round)] = listed
        self.documents[listed.manifest] = content

    def complete(self, manifest: Manifest) -> None:
        """List this manifest and no other, and the shards of all of its ranks."""
        self.hold(document_of(manifest))
        for shard in manifest.shards:
            self.keep(manifest.checkpoint, shard.rank)

    def finish_commit(self, message: FinishCommit) -> Inventory | Refused:
        reply = super().finish_commit(message)
        if isinstance(reply, Refused):
            return reply
        self.add(document_of(parse_manifest(message.manifest.encode())))
        return self.inventory()

    def read_round(self, body: bytes) -> Round:
        return loads(Round, body)

    async def _seal(self, request: web.Request) -> web.Response:
        message = loads(Seal, await request.read())
        self.calls.append(("seal", message))
        return _answer(self.seal(message.round, {} if message.look_in_store else None))

    async def _round(self, request: web.Request) -> web.Response:
        message = self.read_round(await request.read())
        self.calls.append(("round", message))
        if self.cuts > 0 and request.transport is not None:
            self.cuts -= 1
            request.transport.abort()
            return web.Response()
        reply = self.take_round(message)
        if isinstance(reply, Inventory):
            self.rounds.append(message)
        return _answer(reply)

    async def _finish_commit(self, request: web.Request) -> web.Response:
        message = loads(FinishCommit, await request.read())
        self.calls.append(("finish-commit", message))
        return _answer(self.finish_commit(message))

    async def _inventory(self, request: web.Request) -> web.Response:
        self.calls.append(("inventory", None))
        if self.raw_inventory is not None:
            return web.Response(body=self.raw_inventory, content_type="application/json")
        return _answer(self.inventory())

    async def _manifest(self, request: web.Request) -> web.Response:
        self.calls.append(("manifest", int(request.query["step"])))
        if self.raw_manifest is not None:
            return web.Response(body=self.raw_manifest.encode())
        wanted = Step(int(request.query["step"])), RestartRound(int(request.query["round"]))
        if wanted[0] in self.slow:
            await self.slow[wanted[0]].wait()
        listed = self.manifests.get(CheckpointId(*wanted))
        if listed is None or wanted[0] in self.deleted:
            return _answer(self.refuse(Refusal.NOT_FOUND, "manifest"))
        return web.Response(body=self.documents[listed.manifest])

    async def _state(self, request: web.Request) -> web.Response:
        self.since = int(request.query["since"])
        self.calls.append(("state", self.since))
        if self.raw_state is not None:
            return web.Response(body=self.raw_state, content_type="application/json")
        state = self.state
        if self.refuses_state:
            return _answer(self.refuse(Refusal.BUSY, self.refuses_state))
        if state is None:
            return _answer(self.refuse(Refusal.NOT_COORDINATOR, "not the coordinator"))
        if state.version <= self.since:
            try:
                async with asyncio.timeout(float(request.query["timeout"])):
                    await self._changed.wait()
            except TimeoutError:
                pass  # answer with the unchanged state
        return _answer(self.state)

    async def _prune(self, request: web.Request) -> web.Response:
        message = loads(Prune, await request.read())
        self.calls.append(("prune", message))
        if self.refuses_prunes:
            return _answer(self.refuse(Refusal.PROTECTED, "prune"))
        if self.slow_store is not None:
            await self.slow_store.wait()
        return _answer(Ok(message.round))

    async def _ask(self, request: web.Request) -> web.Response:
        try:
            message = loads(GangRequest, await request.read())
        except FormatError as error:
            return _answer(self.refuse(Refusal.BAD_REQUEST, str(error)))
        kind = request.path.rpartition("/")[2]
        self.calls.append((kind, message))
        if kind == "save-now" and self.state is not None:
            tokens = (*self.state.save_tokens, message.token)
            self.publish(replace(self.state, version=self.state.version + 1, save_tokens=tokens))
        return _answer(Ok(self.round))


def _answer(message: Any) -> web.Response:
    status = 409 if isinstance(message, Refused) else 200
    return web.Response(body=dumps(message), status=status, content_type="application/json")
