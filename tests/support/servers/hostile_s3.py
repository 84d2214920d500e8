"""An HTTP proxy in front of a real store that injects the faults that tests choose.

For tests only. Each Fault names the requests that it hits, how often, and what happens to them; all other
requests pass unchanged. The proxy implements HTTP and nothing of S3, with one exception: it signs a request
again after it has removed a header. The store then behaves as if it did not support that header.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import NoReturn, Self, assert_never
from urllib.parse import urlsplit

from minio.signer import sign_v4_s3

from holdfast_core.store.s3.credentials import Keys

_HEAD_LIMIT = 64 << 10
_HOP_HEADERS = frozenset({"content-length", "transfer-encoding", "connection", "keep-alive"})


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Headers by lower-case name."""


Matches = Callable[[Seen], bool]


def on(method: str, *, query: str | None = None) -> Matches:
    """Return a filter of requests by method and query.

    Args:
        method: HTTP method; empty for any.
        query: Text that the query contains; None for any query, empty for requests without a query.
    """

    def matches(seen: Seen) -> bool:
        if method and seen.method != method:
            return False
        return query is None or (query in seen.query if query else not seen.query)

    return matches


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer without forwarding the request to the store."""

    status: int
    code: str = ""
    message: str = "from the proxy"
    location: str = ""
    """Target of a redirect."""

    def body(self) -> bytes:
        return error_document(self.code, self.message) if self.code else b""


@dataclass(frozen=True, slots=True)
class Replace:
    """Forward the request, then send this answer instead of the store's."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class CutRequest:
    """Forward this many bytes of the body, then end both connections.

    The client gets an RST. The store gets an RST if `reset`, else a FIN, as from a client that died.
    """

    after_bytes: int
    reset: bool = True


@dataclass(frozen=True, slots=True)
class FlipRequest:
    """Invert one bit of the request's body before it reaches the store."""

    offset: int


@dataclass(frozen=True, slots=True)
class FreezeRequest:
    """Forward this many bytes of the body and no more until the client disconnects; then end the connection
    to the store.

    `HostileProxy.holding` is set once the bytes are forwarded.
    """

    after_bytes: int


@dataclass(frozen=True, slots=True)
class LoseReply:
    """Forward the request, then reset the client's connection instead of replying."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Forward the request, then keep the client's connection open without a reply."""


@dataclass(frozen=True, slots=True)
class CutReply:
    """Send this many bytes of the reply's body, then end the connection.

    With `lying`, Content-Length states the shortened length, so that the reply looks complete.
    """

    after_bytes: int
    lying: bool = False


@dataclass(frozen=True, slots=True)
class DripReply:
    """Send the reply's body one byte at a time, with a pause after each."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class FlipReply:
    """Invert one bit of the reply's body."""

    offset: int


@dataclass(frozen=True, slots=True)
class SetReplyHeader:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class DropRequestHeader:
    """Remove a header before the request is forwarded. The proxy must have the keys to sign it again."""

    name: str


Action = (
    Answer
    | Replace
    | CutRequest
    | FlipRequest
    | FreezeRequest
    | LoseReply
    | Hang
    | CutReply
    | DripReply
    | FlipReply
    | SetReplyHeader
    | DropRequestHeader
)


@dataclass(slots=True)
class Fault:
    """Action for the next `times` requests that match."""

    matches: Matches
    action: Action
    times: int = 1
    applied: int = field(default=0, init=False)


class HostileProxy:
    """Proxy that applies faults, as `with HostileProxy(server.endpoint) as proxy:`.

    Faults may be added at any time.
    """

    def __init__(self, upstream: str, keys: Keys | None = None, region: str = "us-east-1") -> None:
        self._upstream = upstream
        self._keys = keys
        self._region = region
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._server: _Server | None = None
        self.requests: list[Seen] = []
        self.holding = threading.Event()
        """Set once a Hang or a FreezeRequest holds a request."""
        self.released = threading.Event()
        """Set when the proxy stops, which ends every held request."""

    @property
    def endpoint(self) -> str:
        if self._server is None:
            raise AssertionError("the proxy was not started")
        return f"127.0.0.1:{self._server.server_address[1]}"

    def add(self, matches: Matches, action: Action, times: int = 1) -> Fault:
        fault = Fault(matches, action, times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def body_bytes(self, matches: Matches) -> int:
        """Return the total Content-Length of all matching requests so far."""
        with self._lock:
            bodies = [s.headers.get("content-length", "0") for s in self.requests if matches(s)]
        return sum(int(length) for length in bodies)

    def count(self, matches: Matches) -> int:
        """Return the number of matching requests so far."""
        with self._lock:
            return sum(1 for seen in self.requests if matches(seen))

    def __enter__(self) -> Self:
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.released.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _take(self, seen: Seen) -> Action | None:
        with self._lock:
            self.requests.append(seen)
            for fault in self._faults:
                if fault.applied < fault.times and fault.matches(seen):
                    fault.applied += 1
                    return fault.action
        return None


def error_document(code: str, message: str) -> bytes:
    """Return an S3 `<Error>` document."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    ).encode()


class _EndError(Exception):
    """Ends the handling of a client connection."""


@dataclass(slots=True)
class _Reply:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes

    def head(self, length: int) -> bytes:
        kept = [(k, v) for k, v in self.headers if k.lower() not in _HOP_HEADERS]
        lines = [f"HTTP/1.1 {self.status} {self.reason}", *(f"{k}: {v}" for k, v in kept)]
        return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode("latin-1")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, proxy: HostileProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Connection)


class _Connection(socketserver.StreamRequestHandler):
    """One client connection, which handles its requests in order."""

    server: _Server
    connection: socket.socket

    def handle(self) -> None:
        with contextlib.suppress(_EndError, OSError, http.client.HTTPException):
            while self._one():
                pass

    def _one(self) -> bool:
        head = self._read_head()
        if head is None:
            return False
        seen, headers = head
        length = int(seen.headers.get("content-length", "0"))
        proxy = self.server.proxy
        action = proxy._take(seen)
        if isinstance(action, Answer):
            self._drain(length)
            headers = [("Location", action.location)] if action.location else []
            reply = _Reply(action.status, "Proxy", headers, action.body())
            self._reply(seen, reply, len(reply.body))
            return True
        if isinstance(action, DropRequestHeader):
            headers = self._without(seen, headers, action.name)
        limit = action.after_bytes if isinstance(action, CutRequest | FreezeRequest) else None
        # The client of a Hang cannot tell when the store is done. Later requests wait until it is.
        with proxy._lock if isinstance(action, Hang) else contextlib.nullcontext():
            reply = self._forward(seen, headers, length, limit, action)
        self._apply(seen, reply, action)
        return True

    def _apply(self, seen: Seen, reply: _Reply, action: Action | None) -> None:
        body = reply.body
        match action:
            case (
                None
                | DropRequestHeader()
                | Answer()
                | CutRequest()
                | FlipRequest()
                | FreezeRequest()
            ):
                self._reply(seen, reply, len(body))
            case LoseReply():
                self._reset()
            case Hang():
                self.server.proxy.holding.set()
                self.server.proxy.released.wait()
                raise _EndError
            case Replace(status, other):
                self._reply(seen, _Reply(status, "Proxy", [], other), len(other))
            case CutReply(after_bytes, lying):
                reply.body = body[:after_bytes]
                self._reply(seen, reply, len(reply.body) if lying else len(body))
                raise _EndError
            case DripReply(pause_seconds):
                self._reply(seen, _Reply(reply.status, reply.reason, reply.headers, b""), len(body))
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    if self.server.proxy.released.wait(pause_seconds):
                        raise _EndError
            case FlipReply(offset):
                changed = bytearray(body)
                changed[offset] ^= 0x10
                reply.body = bytes(changed)
                self._reply(seen, reply, len(body))
            case SetReplyHeader(name, value):
                reply.headers = [(k, v) for k, v in reply.headers if k.lower() != name.lower()]
                reply.headers.append((name, value))
                self._reply(seen, reply, len(body))
            case _:
                assert_never(action)

    def _reply(self, seen: Seen, reply: _Reply, length: int) -> None:
        if seen.method == "HEAD":
            stated = [v for k, v in reply.headers if k.lower() == "content-length"]
            self.wfile.write(reply.head(int(stated[0]) if stated else 0))
            return
        self.wfile.write(reply.head(length))
        self.wfile.write(reply.body)

    def _read_head(self) -> tuple[Seen, list[tuple[str, str]]] | None:
        line = self.rfile.readline(_HEAD_LIMIT).decode("latin-1").strip()
        if not line:
            return None
        method, target, _ = line.split(" ", 2)
        headers: list[tuple[str, str]] = []
        while text := self.rfile.readline(_HEAD_LIMIT).decode("latin-1").strip():
            name, _, value = text.partition(":")
            headers.append((name.strip(), value.strip()))
        path, _, query = target.partition("?")
        lower = {name.lower(): value for name, value in headers}
        return Seen(method, path, query, lower), headers

    def _forward(
        self,
        seen: Seen,
        headers: list[tuple[str, str]],
        length: int,
        limit: int | None,
        action: Action | None,
    ) -> _Reply:
        host, _, port = self.server.proxy._upstream.partition(":")
        upstream = http.client.HTTPConnection(host, int(port), timeout=30)
        try:
            target = seen.path + (f"?{seen.query}" if seen.query else "")
            upstream.putrequest(seen.method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                upstream.putheader(name, value)
            upstream.endheaders()
            left = total = length if limit is None else min(length, limit)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while left > 0:
                    data = self.rfile.read(min(left, 64 << 10))
                    if not data:
                        raise _EndError
                    if isinstance(action, FlipRequest):
                        data = _flipped(data, action.offset - (total - left))
                    left -= len(data)
                    upstream.send(data)
            self._drain(left)
            if isinstance(action, FreezeRequest):
                self.server.proxy.holding.set()
                while self.rfile.read1(64 << 10):
                    pass
                raise _EndError
            if isinstance(action, CutRequest):
                if action.reset:
                    _reset_on_close(upstream.sock)
                upstream.close()
                self._reset()
            response = upstream.getresponse()
            return _Reply(response.status, response.reason, response.getheaders(), response.read())
        finally:
            upstream.close()

    def _without(
        self, seen: Seen, headers: list[tuple[str, str]], dropped: str
    ) -> list[tuple[str, str]]:
        keys = self.server.proxy._keys
        authorization = seen.headers.get("authorization", "")
        if keys is None or "SignedHeaders=" not in authorization:
            raise AssertionError("to drop a signed header the proxy needs the keys")
        names = authorization.partition("SignedHeaders=")[2].partition(",")[0].split(";")
        gone = {dropped.lower(), "authorization"}
        signed: dict[str, str | list[str] | tuple[str]] = {
            name: seen.headers[name] for name in names if name not in gone
        }
        url = f"http://{seen.headers['host']}{seen.path}"
        date = datetime.strptime(seen.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        result = sign_v4_s3(
            method=seen.method,
            url=urlsplit(url + (f"?{seen.query}" if seen.query else "")),
            region=self.server.proxy._region,
            headers=signed,
            credentials=keys.for_signer(),
            content_sha256=seen.headers["x-amz-content-sha256"],
            date=date,
        )
        kept = [(k, v) for k, v in headers if k.lower() not in gone]
        return [*kept, ("Authorization", str(result["Authorization"]))]

    def _drain(self, length: int) -> None:
        while length > 0:
            data = self.rfile.read(min(length, 64 << 10))
            if not data:
                raise _EndError
            length -= len(data)

    def _reset(self) -> NoReturn:
        _reset_on_close(self.connection)
        raise _EndError

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()


def _flipped(data: bytes, offset: int) -> bytes:
    """Return `data`, with one bit of the byte at `offset` inverted if that lies within it."""
    if not 0 <= offset < len(data):
        return data
    return data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :]


def _reset_on_close(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
