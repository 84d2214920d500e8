"""Server of the bulk protocol: send ranges of shards to members that copy or restore them.

The handler decides who may read. The number of connections is limited, and unauthenticated callers cannot
keep members out (`holdfast_core.net`). The number of requests in progress has a limit of its own, so that
idle connections do not block requests. Every wait has a time-out. The bytes are not verified here: the
receiver verifies each chunk, and reports a shard that is bad.

A connection keeps the last shard open. Opening a shard reads and verifies its chunk table. For a shard of
10 GiB this costs as much as sending half a range, and a caller requests many ranges of one shard.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange
from holdfast_core.messages.schema import ReadObject, ReadReply
from holdfast_core.net import ConnectionLimits, Connections
from holdfast_core.peer.protocol import (
    PIECE_BYTES,
    SEND_BYTES,
    Line,
    receive_message,
    refusal,
    send_message,
    tune,
)
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import NodeTier, ShardReader


class OpenObject(Closing, Protocol):
    """An object that is open for reading."""

    @property
    def size_bytes(self) -> int: ...

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        """See tiers.base.ShardReader."""
        ...


OpenByKey = Callable[[str], OpenObject]
"""Opens an object. Raises NotFoundError, CorruptionError, UnavailableError."""


def shards_of(tier: NodeTier) -> OpenByKey:
    """Return a function that opens the shards of a tier by `format.keys.node_key`."""

    def opened(key: str) -> ShardReader:
        for record in tier.list_shards():
            if node_key(record.ref) == key:
                return tier.open_shard(record.ref)
        raise NotFoundError(f"this node has no shard {key!r}")

    return opened


class KeptObject(Closing):
    """The last object that a connection has opened. Not thread-safe."""

    def __init__(self, opened: OpenByKey) -> None:
        self._opened = opened
        self._last: tuple[str, OpenObject] | None = None

    def of(self, key: str) -> OpenObject:
        """Return the object of a key. The caller must not close it. Raises what `OpenByKey` raises."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self.close()
        found = self._opened(key)
        self._last = key, found
        return found

    def close(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].close()


CONNECTION_THREAD = "bulk"
"""Name of each thread that serves a connection."""
_ENDING = 64
"""Number of threads allowed in addition to the connections, for connections that were replaced and are
ending."""


class BulkHandler(Protocol):
    """Decisions of the sidecar. The methods are called in several threads."""

    def authorize(self, peer_dns_name: str, key: str) -> None:
        """Check whether the peer may read a shard. Raises RefusedError.

        Called before a read and again before each piece of it, because the caller may cease to be a member
        meanwhile. It must not block.
        """
        ...

    def allows_plain(self) -> bool:
        """Return whether the job allows payloads outside TLS. They leave it if the caller allows it, too."""
        ...

    def throttle(self, byte_count: int) -> None:
        """Block until a background transfer may send so many more bytes."""
        ...


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """Limits of a bulk server."""

    connections: ConnectionLimits = field(
        default_factory=lambda: ConnectionLimits(authenticated=512)
    )
    requests: int = 32
    """Requests in progress at the same time, at most half of them of one member. Others wait for at most
    `io_seconds` and are then refused."""
    handshake_seconds: float = 10.0
    """Time-out of the first TLS handshake of a connection."""
    io_seconds: float = 30.0
    """Time-out of each wait for the socket within a request."""
    idle_seconds: float = 60.0
    """Time-out between two requests on one connection."""


class BulkServer:
    """Bulk server of a sidecar. One thread accepts connections, and one thread serves each of them."""

    def __init__(
        self,
        handler: BulkHandler,
        objects: OpenByKey,
        context: ssl.SSLContext,
        *,
        limits: BulkLimits | None = None,
        dropped: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create a server; it accepts nothing before it is started.

        Args:
            handler: Decides who may read.
            objects: Opens what is served: `open_shard.shards_of` a tier.
            context: TLS settings, which require a client certificate.
            limits: Limits other than the usual ones.
            dropped: Called with the reason, in any thread, for each connection that the server closes for
                a newer one, cannot accept, or loses in the first handshake.
        """
        self._handler = handler
        self._objects = objects
        self._context = context
        self._limits = limits or BulkLimits()
        self._turns = threading.BoundedSemaphore(self._limits.requests)
        self._turns_of: WeakValueDictionary[str, threading.BoundedSemaphore] = WeakValueDictionary()
        """The share of each member that has requests. Without it one that reads nothing blocks all others."""
        self._connections: Connections[Line] = Connections(self._limits.connections, self._replaced)
        self._dropped = dropped
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, Line] = {}
        self._closing = threading.Event()

    def start(self, host: str, port: int) -> int:
        """Start to listen, and return the bound port.

        Args:
            host: Address to listen on. Empty means all addresses.
            port: Port to listen on. 0 means any free port.

        Raises:
            ConfigError: The address cannot be used, for example because the port is in use.
        """
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise ConfigError(f"bulk server on {host}:{port}: {error}") from error
        self._acceptor = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)
        self._acceptor.start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """End all connections."""
        self._closing.set()
        listener = self._listener
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()
        if self._acceptor is not None:
            # It ends first. Otherwise a connection that it has just accepted would be missed, or its thread
            # be joined before it has started, which is an error.
            self._acceptor.join(self._limits.io_seconds)
        with self._lock:
            threads = dict(self._open)
        for line in threads.values():
            line.interrupt()
        for thread in threads:
            thread.join(self._limits.io_seconds)

    def _accept(self) -> None:
        listener = self._listener
        if listener is None:
            return
        limits = self._limits.connections
        most = limits.handshakes + limits.authenticated + _ENDING
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                # Listen again after an error such as a lack of descriptors, but not after `close`.
                if not self._closing.wait(0.1):
                    self._dropped("accept")
                continue
            line = Line(sock, self._wrap)
            self._connections.add(line)
            thread = threading.Thread(
                target=self._serve, args=(line, sock), name="bulk", daemon=True
            )
            with self._lock:
                self._open[thread] = line
            try:
                thread.start()
            except RuntimeError:
                # The trainer may have reached the pod's limit of processes. Continue to listen.
                with self._lock:
                    self._open.pop(thread, None)
                self._connections.remove(line)
                sock.close()
                self._dropped("accept")
            while len(self._open) >= most and not self._closing.wait(0.01):
                continue  # wait for the threads of connections that were replaced

    def _replaced(self, line: Line) -> None:
        self._dropped("room")
        line.interrupt()

    @property
    def connections(self) -> int:
        """Return the number of connections whose threads have not ended."""
        return len(self._open)

    def _wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _serve(self, line: Line, plain: socket.socket) -> None:
        try:
            with line:
                plain.settimeout(self._limits.handshake_seconds)
                try:
                    peer = line.secure()
                except (OSError, HoldfastError):
                    self._dropped("handshake")
                    return
                if not self._connections.authenticate(line, peer):
                    self._dropped("room")
                    return
                tune(line.sock)
                with KeptObject(self._objects) as kept:
                    self._converse(line, peer, kept)
        except (OSError, HoldfastError):
            # A member logs the failure on its side. Errors of unauthenticated callers must not fill this log.
            return
        finally:
            self._connections.remove(line)
            with self._lock:
                self._open.pop(threading.current_thread(), None)

    def _converse(self, line: Line, peer: str, kept: KeptObject) -> None:
        plain = False
        while not (self._closing.is_set() or plain):
            line.sock.settimeout(self._limits.idle_seconds)
            request = receive_message(line.sock, ReadObject)
            if request is None:
                return
            line.sock.settimeout(self._limits.io_seconds)
            plain = self._answer(line, peer, request, kept)

    @contextmanager
    def _turn(self, peer: str) -> Iterator[None]:
        most = max(1, self._limits.requests // 2)
        with self._lock:
            share = self._turns_of.setdefault(peer, threading.BoundedSemaphore(most))
        with (
            self._acquired(share, f"{most} requests of {peer}"),
            self._acquired(self._turns, f"{self._limits.requests} requests"),
        ):
            yield

    @contextmanager
    def _acquired(self, turns: threading.BoundedSemaphore, what: str) -> Iterator[None]:
        if not turns.acquire(timeout=self._limits.io_seconds):
            raise UnavailableError(
                f"bulk: {what} are in progress, and none ended within "
                f"{self._limits.io_seconds:.0f} s"
            )
        try:
            yield
        finally:
            turns.release()

    def _answer(self, line: Line, peer: str, request: ReadObject, kept: KeptObject) -> bool:
        """Answer one request, and return whether the connection has left TLS.

        An error before the reply is the reply. After it, only the end of the connection can show an error,
        because the caller takes each byte for a part of the shard.
        """
        replied = False
        try:
            with self._turn(peer):
                self._handler.authorize(peer, request.key)
                found = kept.of(request.key)
                if request.range is None:
                    send_message(line.sock, ReadReply(found.size_bytes))
                    return False
                wanted = _checked(found.size_bytes, request.range)
                plain = request.plain and self._handler.allows_plain()
                send_message(line.sock, ReadReply(wanted.length_bytes, plain))
                replied = True
                if plain:
                    line.leave()
                self._send(line.sock, peer, request, found, wanted)
                return plain
        except HoldfastError as error:
            if replied:
                raise
            send_message(line.sock, refusal(error))
            return False

    def _send(
        self,
        sock: socket.socket,
        peer: str,
        request: ReadObject,
        found: OpenObject,
        wanted: ByteRange,
    ) -> None:
        """Send the range of the object. The next piece is read while one is being sent.

        Raises:
            HoldfastError: The caller may not read any more, or the file cannot be read.
            OSError: The connection failed.
        """
        with closing(found.read_file(_pieces(wanted))) as views:
            for piece, view in zip(_pieces(wanted), views, strict=True):
                if len(view) != piece.length_bytes:
                    raise CorruptionError(
                        f"{request.key}: the file ends at {piece.start + len(view)} of "
                        f"{found.size_bytes}"
                    )
                self._handler.authorize(peer, request.key)
                if request.background:
                    self._handler.throttle(len(view))
                for start in range(0, len(view), SEND_BYTES):
                    sock.sendall(view[start : start + SEND_BYTES])


def _pieces(wanted: ByteRange) -> Iterator[ByteRange]:
    return (
        ByteRange(start, min(start + PIECE_BYTES, wanted.stop))
        for start in range(wanted.start, wanted.stop, PIECE_BYTES)
    )


def _checked(size_bytes: int, wanted: ByteRange) -> ByteRange:
    """Return the range to send. Raises FormatError if the object does not have it."""
    if not wanted.start <= wanted.stop <= size_bytes:
        raise FormatError(
            f"bulk: bytes [{wanted.start}, {wanted.stop}) of an object of {size_bytes}"
        )
    return wanted
