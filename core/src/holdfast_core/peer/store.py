"""A peer as a store that is only read: ranges of its shards, on connections of the bulk protocol.

The peer is not trusted. The caller verifies all bytes, as it does for any store (store.download).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from holdfast_core.closing import Closing
from holdfast_core.errors import FormatError, NotFoundError, UnavailableError
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.messages.schema import ObjectRange, ReadObject, ReadReply
from holdfast_core.pacing.minimum_rate import MinimumRate
from holdfast_core.peer.protocol import (
    Attempts,
    Line,
    Peer,
    connection_error,
    raise_refusal,
    receive_message,
    send_message,
)
from holdfast_core.shards.file import head_bytes
from holdfast_core.store.download.shard import StoredShardReader, none_bad, open_stored_shard
from holdfast_core.store.download.stored import StoredShards
from holdfast_core.tiers.pooled import CLOSING

RUN_BYTES = 4 << 20
"""Length of the ranges of a copy. The progress of a copy is reported once for each."""
_AHEAD_BYTES = 1 << 30
"""Largest length of one answer. One answer serves consecutive reads, so that the peer sends while the caller
uses the bytes. Each answer outside TLS needs a connection of its own."""
_PLAIN_BYTES = 2 << 20
"""Shortest range that is worth a connection of its own, which leaving TLS takes."""
_PROGRESS_BYTES = 1 << 20
"""An attempt that received this many bytes resets the count of failed attempts."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Reply and bytes that the peer sends now, at its minimum rate."""

    line: Line
    rate: MinimumRate

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read into `buffer`. Return the number of bytes, or 0 if the peer closed the connection.

        Raises UnavailableError if the peer is too slow, and OSError.
        """
        sock = self.line.sock
        return self.rate.receive(sock, sock.gettimeout(), sock.recv_into, buffer) or 0


@dataclass(slots=True)
class _Stream:
    """Bytes of an object that arrive one after the other, for one read or for several."""

    key: str
    answer: PeerAnswer
    is_plain: bool
    left: ByteRange

    @property
    def is_done(self) -> bool:
        return self.left.length_bytes == 0

    def fill(self, buffer: memoryview, stopped: threading.Event | None) -> int:
        """Read some bytes into the buffer and return how many.

        Raises what `PeerAnswer.recv_into` raises, OSError at an early end, and UnavailableError once
        `stopped` is set.
        """
        if stopped is not None and stopped.is_set():
            raise UnavailableError("bulk: the bytes are not needed any more")
        count = self.answer.recv_into(buffer[: self.left.length_bytes])
        if count == 0:
            raise ConnectionResetError(
                f"the peer closed the connection {self.left.length_bytes} bytes too early"
            )
        self.left = ByteRange(self.left.start + count, self.left.stop)
        return count


class PeerStore(Closing):
    """The shards of a peer, as a tiers.objects.RangedStore. The key of a shard is `format.keys.node_key`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._open: set[Line] = set()
        self._idle: list[Line] = []
        self._stream: _Stream | None = None
        """An answer of which the next read may take the next bytes."""
        self._closed = False
        self._payload = ByteRange(0, 0)
        """The part of the payload that was not read yet. Only it is requested ahead, and only it may come
        outside TLS: the caller reads bytes again if they were damaged, and then no attacker on the network
        must be able to damage them again."""
        self._may_leave = peer.options.plain
        self.left_tls = False
        """Whether bytes came outside TLS since `stay_inside`. An attacker may have changed them."""
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="peer-store")

    @property
    def name(self) -> str:
        return str(self._peer)

    def open_shard(self, ref: ShardRef) -> StoredShardReader:
        """Read the shard's trailer, inside TLS, and return a source of its ranges.

        The source owns the connections: closing it closes this store, and so does an error of this call.
        Only the payload of the shard may come outside TLS.

        Raises:
            NotFoundError: The peer does not have the shard.
            CorruptionError: The peer's copy is corrupt.
            RefusedError: The peer refuses the request.
            AccessDeniedError: A side refuses the other's certificate.
            FormatError: The peer violates the protocol.
            UnavailableError: All attempts failed.
        """
        shards = StoredShards(self, lambda ref, packed: node_key(ref), packs=False)
        try:
            shard = open_stored_shard(
                self,
                shards,
                self._workers,
                ref,
                ahead_bytes=2 * RUN_BYTES,
                find_bad_piece=none_bad,
                close=self.close,
            )
        except BaseException:
            self.close()
            raise
        header = shard.trailer.record.header
        head = head_bytes(header)
        with self._lock:
            self._payload = ByteRange(head, head + header.payload_bytes)
        return shard

    def size(self, key: str, *, sure: bool = False) -> int | None:
        """See RangedStore. One look is sure."""
        attempts = Attempts(self._peer.options.attempts)
        while True:
            try:
                answer, reply = self._ask(ReadObject(key))
                self._ended(answer.line)
                return reply.length_bytes
            except NotFoundError:
                return None
            except UnavailableError as error:
                self._check_open()
                attempts.failed(error)

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        """See RangedStore. After a broken connection the read continues where it stopped."""
        attempts = Attempts(self._peer.options.attempts)
        filled = 0
        while filled < len(buffer):
            before = filled
            try:
                stream = self._stream_of(key, ByteRange(start + filled, start + len(buffer)))
                with self._received(stream):
                    while not stream.is_done and filled < len(buffer):
                        filled += stream.fill(buffer[filled:], stopped)
                self._keep(stream)
            except UnavailableError as error:
                self._check_open()
                if stopped is not None and stopped.is_set():
                    raise
                if filled - before >= _PROGRESS_BYTES:
                    attempts.progressed()
                attempts.failed(error)

    def stay_inside(self) -> None:
        """Keep all further requests inside TLS."""
        self._may_leave = self.left_tls = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lines = list(self._open)
        for line in lines:
            line.interrupt()
        self._workers.shutdown(cancel_futures=True)
        for line in lines:
            line.close()

    def _stream_of(self, key: str, wanted: ByteRange) -> _Stream:
        """Return the answer that continues with these bytes, or request them.

        Bytes behind them are requested too where the read continues the one before it, or begins the payload.
        """
        with self._lock:
            stream, self._stream = self._stream, None
            payload = self._payload
            is_fresh = payload.start <= wanted.start and wanted.stop <= payload.stop
            if is_fresh:
                self._payload = ByteRange(wanted.stop, payload.stop)
        if stream is not None:
            if (stream.key, stream.left.start) == (key, wanted.start):
                return stream
            self._drop(stream.answer.line)
        stop = wanted.stop
        if is_fresh and wanted.start == payload.start:
            stop = max(stop, min(wanted.start + _AHEAD_BYTES, payload.stop))
        request = ReadObject(
            key,
            ObjectRange(wanted.start, stop),
            plain=self._may_leave and is_fresh and wanted.length_bytes >= _PLAIN_BYTES,
            background=self._peer.options.background,
        )
        answer, reply = self._ask(request)
        stream = _Stream(key, answer, reply.plain, ByteRange(wanted.start, stop))
        with self._received(stream):
            if reply.length_bytes != stream.left.length_bytes:
                raise FormatError(
                    f"bulk: {self._peer} announced {reply.length_bytes} bytes of {key}, "
                    f"expected {stream.left.length_bytes}"
                )
            if reply.plain:
                self.left_tls = True
                answer.line.leave()
        return stream

    def _received(self, stream: _Stream) -> AbstractContextManager[None]:
        """Receive bytes of an answer in the body. See `_talking`."""
        operation = f"bulk: reading {stream.key} from {self._peer}"
        return self._talking(stream.answer.line, operation, is_plain=stream.is_plain)

    @contextmanager
    def _talking(self, line: Line, operation: str, *, is_plain: bool = False) -> Iterator[None]:
        """Close the connection after any error of the body, because bytes may still arrive on it.

        An error of bytes that came outside TLS is an UnavailableError, because an attacker on the network
        may have caused it, so it shows nothing about the peer. After any error all further requests stay
        inside TLS.
        """
        try:
            yield
        except BaseException as error:
            self._may_leave = False
            self._drop(line)
            if is_plain and isinstance(error, OSError | FormatError):
                raise UnavailableError(
                    f"{operation}: outside TLS: {error or type(error).__name__}"
                ) from error
            if isinstance(error, OSError):
                raise connection_error(error, operation) from error
            raise

    def _keep(self, stream: _Stream) -> None:
        """Keep what is left of an answer for the next read."""
        if stream.is_done:
            if stream.is_plain:
                self._drop(stream.answer.line)
            else:
                self._ended(stream.answer.line)
            return
        with self._lock:
            before, self._stream = self._stream, stream
        if before is not None:
            self._drop(before.answer.line)

    def _ask(self, request: ReadObject) -> tuple[PeerAnswer, ReadReply]:
        """Send a request on an idle connection or a new one, and return the answer after its reply."""
        operation = f"bulk: reading {request.key} from {self._peer}"
        line = self._connected(operation)
        with self._talking(line, operation):
            answer = PeerAnswer(line, self._peer.rate(f"bulk: {request.key}"))
            send_message(line.sock, request)
            reply = receive_message(answer, ReadReply)
            if reply is None:
                raise ConnectionResetError("the peer closed the connection before its reply")
            if reply.refused is not None:
                raise_refusal(reply.refused, operation)
            if reply.plain and not request.plain:
                raise FormatError(
                    f"{operation}: the peer left TLS, which the request did not allow"
                )
        return answer, reply

    def _connected(self, operation: str) -> Line:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            line = self._peer.connected()
        except OSError as error:
            raise connection_error(error, operation) from error
        with self._lock:
            self._open.add(line)
        if self._closed:
            self._drop(line)
            self._check_open()
        return line

    def _ended(self, line: Line) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            self._idle.append(line)

    def _drop(self, line: Line) -> None:
        with self._lock:
            self._open.discard(line)
        line.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(f"bulk: {self._peer}: {CLOSING}")
