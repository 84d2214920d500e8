"""Server of the bulk protocol: receive copies from peers, and send shards to members that restore.

The handler decides who may put and get shards. The number of connections is limited, and unauthenticated
callers cannot take the places of members (net.admission). The number of requests in progress has a limit of
its own, so that idle connections do not block requests. Every wait has a time-out. A copy whose connection
broke is kept for a while for its sender.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from holdfast_core.clock import SystemClock
from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    HoldfastError,
    UnavailableError,
)
from holdfast_core.format.digest import crc32c
from holdfast_core.ids import ByteRange, RestartRound, ShardRef
from holdfast_core.net.admission import Admission, Places
from holdfast_core.peer.assemble import LocalChunks, chunks_of
from holdfast_core.peer.connection import Line
from holdfast_core.peer.copies import BrokenTransferError, Copies, Copy
from holdfast_core.peer.data import (
    chunk_span,
    pieces,
    receive_piece,
    send_data,
    send_outside,
    send_pieces,
)
from holdfast_core.peer.equal_chunks import Run
from holdfast_core.peer.open_shard import KeptReader
from holdfast_core.peer.protocol import (
    MAX_DATA_BYTES,
    BulkFrame,
    Kind,
    Status,
    error_reply,
    receive_frame,
    send_frame,
    tune,
)
from holdfast_core.peer.table import receive_table, send_table
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import CopyWriter, NodeTier, ShardReader

CONNECTION_THREAD = "bulk"
"""Name of each thread that serves a connection."""
_ENDING = 64
"""Number of threads allowed in addition to the places, for connections that have lost their place and are
ending."""
_DRAIN_BYTES = 16 << 20
_DRAIN_SECONDS = 2.0


class BulkHandler(Protocol):
    """Decisions of the sidecar. The methods are called in several threads and must not block."""

    def authorize_put(
        self, peer_dns_name: str, round: RestartRound, ref: ShardRef, file_bytes: int
    ) -> None:
        """Check whether the peer may put a copy. Called before the copy and again before its commit.

        Raises RefusedError, StaleRoundError.
        """
        ...

    def authorize_get(self, peer_dns_name: str, ref: ShardRef) -> None:
        """Check whether the peer may read a shard. Raises RefusedError.

        Called before a read and again before each piece of it, because the caller may cease to be a member
        meanwhile.
        """
        ...

    def allows_plain(self) -> bool:
        """Return whether the job allows payloads outside TLS. They leave it if the caller allows it, too."""
        ...


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """Limits of a bulk server."""

    places: Places = field(default_factory=lambda: Places(known=512))
    requests: int = 32
    """Requests in progress at the same time. Others wait for at most `io_seconds` and are then refused."""
    handshake_seconds: float = 10.0
    """Time-out of the first TLS handshake of a connection."""
    io_seconds: float = 30.0
    """Time-out of each wait for the socket within a request."""
    idle_seconds: float = 60.0
    """Time-out between two requests on one connection."""
    parked_copies: int = 8
    """Copies that are kept after their connection broke."""
    parked_seconds: float = 60.0
    """Time for which such a copy is kept for its sender."""


class BulkServer:
    """Bulk server of a sidecar. One thread accepts connections, and one thread serves each of them."""

    def __init__(
        self,
        handler: BulkHandler,
        tier: NodeTier,
        context: ssl.SSLContext,
        *,
        limits: BulkLimits | None = None,
        expected: Callable[[], Container[str]] = frozenset,
        dropped: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create a server; it accepts nothing before it is started.

        Args:
            tier: Stores the copies and has the shards.
            context: TLS settings, which require a client certificate.
            expected: Returns the addresses of members.
            dropped: Called with the reason, in any thread, for each connection that the server closes for
                lack of a place, cannot accept, or loses in the first handshake.
        """
        self._handler = handler
        self._tier = tier
        self._context = context
        self._limits = limits or BulkLimits()
        self._copies = Copies(
            tier,
            SystemClock(),
            parked_copies=self._limits.parked_copies,
            parked_seconds=self._limits.parked_seconds,
        )
        self._turns = threading.BoundedSemaphore(self._limits.requests)
        self._admission: Admission[Line] = Admission(
            self._limits.places, self._displace, expected=expected
        )
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
        """End all connections, and abort incomplete copies."""
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
        self._copies.drop_all()

    def _accept(self) -> None:
        listener = self._listener
        if listener is None:
            return
        places = self._limits.places
        most = places.unauthenticated + places.expected + places.known + _ENDING
        while not self._closing.is_set():
            try:
                sock, address = listener.accept()
            except OSError:
                # Listen again after an error such as a lack of descriptors, but not after `close`.
                if not self._closing.wait(0.1):
                    self._dropped("accept")
                continue
            line = Line(sock, self._wrap)
            self._admission.enter(line, str(address[0]))
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
                self._admission.leave(line)
                sock.close()
                self._dropped("accept")
            while len(self._open) >= most and not self._closing.wait(0.01):
                continue  # wait for the threads of connections that lost their places

    def _displace(self, line: Line) -> None:
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
                if not self._admission.is_known(line, peer):
                    self._dropped("room")
                    return
                tune(line.sock)
                with KeptReader(self._open_shard) as kept:
                    self._converse(line, peer, kept)
        except (OSError, HoldfastError):
            # A member logs the failure on its side. Errors of unauthenticated callers must not fill this log.
            return
        finally:
            self._admission.leave(line)
            with self._lock:
                self._open.pop(threading.current_thread(), None)

    def _converse(self, line: Line, peer: str, kept: KeptReader) -> None:
        while not (self._closing.is_set() or line.outside):
            line.sock.settimeout(self._limits.idle_seconds)
            request = receive_frame(line.sock)
            if request is None:
                return
            line.sock.settimeout(self._limits.io_seconds)
            try:
                with self._admission.working(line), self._turn():
                    self._answer(line, peer, request, kept)
            except HoldfastError as error:
                if line.outside:
                    return  # the caller ignores a REPLY outside TLS and tries again inside
                send_frame(line.sock, error_reply(request, error))
                _drain(line.sock)
                return

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(timeout=self._limits.io_seconds):
            raise UnavailableError(
                f"bulk: {self._limits.requests} requests are in progress, and none ended within "
                f"{self._limits.io_seconds:.0f} s"
            )
        try:
            yield
        finally:
            self._turns.release()

    def _answer(self, line: Line, peer: str, request: BulkFrame, kept: KeptReader) -> None:
        match request.kind:
            case Kind.PUT_COPY:
                self._take_copy(line, peer, request)
            case Kind.GET_SHARD:
                self._handler.authorize_get(peer, request.ref)
                with self._open_shard(request.ref) as reader:
                    self._send_file(line, peer, request, reader)
            case Kind.GET_RANGE:
                self._handler.authorize_get(peer, request.ref)
                self._send_range(line.sock, peer, request, kept.of(request.ref))
            case Kind.GET_TABLE:
                self._handler.authorize_get(peer, request.ref)
                reader = kept.of(request.ref)
                size = reader.record.file_bytes
                reply = BulkFrame(Kind.REPLY, request.ref, request.round, length=size)
                send_frame(line.sock, reply)
                send_table(line.sock, request, reader)
            case Kind.DATA | Kind.REPLY:
                raise FormatError(f"bulk: {request.kind.name} is not a request")

    def _open_shard(self, ref: ShardRef) -> ShardReader:
        try:
            return self._tier.open_shard(ref)
        except CorruptionError as error:
            self._tier.quarantine(ref, str(error))
            raise

    def _take_copy(self, line: Line, peer: str, request: BulkFrame) -> None:
        self._handler.authorize_put(peer, request.round, request.ref, request.length)
        if self._tier.find(request.ref) is not None:
            send_frame(line.sock, BulkFrame(Kind.REPLY, request.ref, request.round, Status.HAVE))
            return
        copy = self._copies.begin(request.ref, request.length, line.interrupt)
        parked = False
        try:
            if self._tier.find(request.ref) is not None:
                # The older connection, which was interrupted, has completed the copy.
                have = BulkFrame(Kind.REPLY, request.ref, request.round, Status.HAVE)
                send_frame(line.sock, have)
                return
            self._receive_copy(line, request, copy)
            self._handler.authorize_put(peer, request.round, request.ref, request.length)
            copy.writer.commit()
        except BrokenTransferError:
            parked = True  # the bytes so far are good, and the sender may send the rest later
            raise
        except CorruptionError as error:
            if not copy.outside:
                raise
            # An attacker may have changed the bytes, so the sender's shard need not be corrupt.
            raise UnavailableError(f"receiving bytes outside TLS: {error}") from error
        finally:
            self._copies.end(request.ref, request.length, copy if parked else None)
            if not parked:
                copy.writer.abort()
        send_frame(line.sock, BulkFrame(Kind.REPLY, request.ref, request.round))

    def _receive_copy(self, line: Line, request: BulkFrame, copy: Copy) -> None:
        writer = copy.writer
        plain = request.plain and self._handler.allows_plain()
        with LocalChunks(self._tier, request.ref) as local:
            reply = BulkFrame(
                Kind.REPLY,
                request.ref,
                request.round,
                offset=writer.offset,
                plain=plain,
                table=bool(local),
            )
            with _broken(request):
                send_frame(line.sock, reply)
            rest = _Rest(request, copy, local)
            if local:
                rest.leave_out(line.sock)
            if not plain:
                rest.receive(line.sock)
                return
            if writer.offset == 0:
                _receive_until(line.sock, request, writer, 1)
            copy.outside = True
            with _broken(request):
                line.leave()
            rest.receive(line.sock)
            with _broken(request):
                line.secure()

    def _send_file(self, line: Line, peer: str, request: BulkFrame, reader: ShardReader) -> None:
        size = reader.record.file_bytes
        if request.offset > size:
            raise FormatError(f"bulk: offset {request.offset} of a file of {size} bytes")
        plain = request.plain and self._handler.allows_plain()
        send_frame(
            line.sock,
            BulkFrame(
                Kind.REPLY,
                request.ref,
                request.round,
                offset=request.offset,
                length=size,
                plain=plain,
            ),
        )
        wanted = tuple(pieces(reader.record, ByteRange(request.offset, size)))

        def still_may(length: int) -> None:
            self._handler.authorize_get(peer, request.ref)

        try:
            if plain:
                send_outside(line, request, reader, wanted, still_may)
            else:
                send_pieces(line.sock, request, reader, wanted, still_may)
        except CorruptionError as error:
            self._tier.quarantine(request.ref, str(error))
            raise

    def _send_range(
        self, sock: ssl.SSLSocket, peer: str, request: BulkFrame, reader: ShardReader
    ) -> None:
        header = reader.record.header
        stop = request.offset + request.length
        if stop > header.payload_bytes:
            raise FormatError(
                f"bulk: range [{request.offset}, {stop}) of a payload of {header.payload_bytes}"
            )
        send_frame(sock, BulkFrame(Kind.REPLY, request.ref, request.round, length=request.length))
        buffer = memoryview(bytearray(min(header.chunk_bytes, header.payload_bytes)))
        first = request.offset - request.offset % header.chunk_bytes
        for start in range(first, stop, header.chunk_bytes):
            self._handler.authorize_get(peer, request.ref)
            chunk = buffer[: min(header.chunk_bytes, header.payload_bytes - start)]
            try:
                reader.read_payload_into(start, chunk)
            except CorruptionError as error:
                self._tier.quarantine(request.ref, str(error))
                raise
            piece = ByteRange(max(start, request.offset), min(start + len(chunk), stop))
            for offset in range(piece.start, piece.stop, MAX_DATA_BYTES):
                end = min(offset + MAX_DATA_BYTES, piece.stop)
                data = chunk[offset - start : end - start]
                send_data(sock, request, offset, data, crc32c(data))


class _Rest:
    """Receiver of the rest of a copy, from the sender and from this node's own shards."""

    def __init__(self, request: BulkFrame, copy: Copy, local: LocalChunks) -> None:
        self._request = request
        self._writer = copy.writer
        self._local = local
        self._record: ShardRecord | None = None
        self._runs: tuple[Run, ...] = ()

    def leave_out(self, sock: socket.socket) -> None:
        """Receive the trailer, and reply with the chunks that the sender leaves out."""
        request = self._request
        with _broken(request):
            trailer = receive_table(sock, request, request.length)
            self._record = trailer.record
            self._runs = self._local.runs(trailer, self._writer.offset)
            have = chunks_of(self._runs)
            send_frame(sock, BulkFrame(Kind.REPLY, request.ref, request.round, have=have))

    def receive(self, sock: socket.socket) -> None:
        """Receive the rest of the copy, in order, until it is complete."""
        request, writer = self._request, self._writer
        for run in self._runs:
            if self._record is None:
                break
            _receive_until(sock, request, writer, chunk_span(self._record, run.chunks).start)
            with _broken(request):
                self._local.take(self._record, run, writer)
        _receive_until(sock, request, writer, request.length)


def _receive_until(sock: socket.socket, request: BulkFrame, writer: CopyWriter, stop: int) -> None:
    """Receive DATA frames until the writer's offset is `stop` or more."""
    while writer.offset < stop:
        with _broken(request):
            frame = receive_frame(sock)
            if frame is None:
                raise ConnectionResetError("the sender closed the connection within the copy")
            length = receive_piece(sock, frame, request, writer)
        writer.advance(length)


@contextmanager
def _broken(request: BulkFrame) -> Iterator[None]:
    """Raise errors of the connection as BrokenTransferError."""
    try:
        yield
    except (OSError, UnavailableError) as error:
        raise BrokenTransferError(
            f"copy of {request.ref}: {error or type(error).__name__}"
        ) from error


def _drain(sock: ssl.SSLSocket) -> None:
    """Read what the caller still sends. Otherwise closing the connection resets it and may lose our REPLY."""
    sock.settimeout(_DRAIN_SECONDS)
    buffer = bytearray(64 << 10)
    left = _DRAIN_BYTES
    with contextlib.suppress(OSError):
        while left > 0 and (count := sock.recv_into(buffer)) > 0:
            left -= count
