"""A peer as a store that is only read: ranges of its shards, on connections of the bulk protocol.

The peer is not trusted. The caller verifies all bytes, as it does for any store (store.download).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from holdfast_core.store.download.shard import StoredShardReader, open_stored_shard
from holdfast_core.store.download.stored import StoredShards
from holdfast_core.tiers.pooled import CLOSING

READERS = 2
"""Ranges that are requested at the same time: while one is verified, the peer reads and sends the next."""
RUN_BYTES = 8 << 20
"""Length of the ranges of a copy. The progress of a copy is reported once for each."""
PLAIN_RUN_BYTES = 16 << 20
"""Length of the ranges of a copy outside TLS, each of which needs a handshake of its own."""
_PLAIN_BYTES = 2 << 20
"""Shortest range that is worth a connection of its own, which leaving TLS takes."""
_PROGRESS_BYTES = 1 << 20
"""Bytes of one attempt after which earlier failures do not count any more."""


@dataclass(frozen=True, slots=True)
class Answer:
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
class _Filling:
    """A buffer that is being filled, by one or more answers."""

    start: int
    """Position of the buffer's first byte in the object."""
    buffer: memoryview
    stopped: threading.Event | None
    """See RangedStore.read_into."""
    filled: int = 0

    @property
    def left(self) -> ByteRange:
        return ByteRange(self.start + self.filled, self.start + len(self.buffer))

    def take(self, answer: Answer) -> None:
        """Fill the rest of the buffer. Raises what `Answer.recv_into` raises, and OSError at an early end."""
        while self.filled < len(self.buffer):
            if self.stopped is not None and self.stopped.is_set():
                raise UnavailableError("bulk: the bytes are not needed any more")
            count = answer.recv_into(self.buffer[self.filled :])
            if count == 0:
                raise ConnectionResetError(
                    f"the peer closed the connection at {self.filled} of {len(self.buffer)} bytes"
                )
            self.filled += count


class PeerStore(Closing):
    """The shards of a peer, as a tiers.objects.RangedStore. The key of a shard is `format.keys.node_key`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._closed = False
        self._outside = ByteRange(0, 0)
        """The bytes that may come outside TLS. They are read there once: the caller reads bytes again only
        if they were damaged, and then no attacker on the network must be able to damage them again."""
        self._may_leave = peer.options.plain
        self.left_tls = False
        """Whether bytes came outside TLS since `stay_inside`. An attacker may have changed them."""
        self._workers = ThreadPoolExecutor(READERS, thread_name_prefix="peer-store")

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
                ahead_bytes=READERS * self.run_bytes,
                close=self.close,
            )
        except BaseException:
            self.close()
            raise
        header = shard.trailer.record.header
        head = head_bytes(header)
        with self._lock:
            self._outside = ByteRange(head, head + header.payload_bytes)
        return shard

    @property
    def run_bytes(self) -> int:
        """Return how long the ranges of a copy should be."""
        return PLAIN_RUN_BYTES if self._may_leave else RUN_BYTES

    def size(self, key: str, *, sure: bool = False) -> int | None:
        """See RangedStore. One look is sure."""
        attempts = Attempts(self._peer.options.attempts)
        while True:
            try:
                with self._answered(ReadObject(key)) as (_, reply):
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
        filling = _Filling(start, buffer, stopped)
        attempts = Attempts(self._peer.options.attempts)
        while True:
            before = filling.filled
            try:
                self._read(key, filling)
                return
            except UnavailableError as error:
                self._check_open()
                if stopped is not None and stopped.is_set():
                    raise
                if filling.filled - before >= _PROGRESS_BYTES:
                    attempts.progressed()
                attempts.failed(error)

    def stay_inside(self) -> None:
        """Keep all further requests inside TLS."""
        self._may_leave = self.left_tls = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for line in busy:
            line.interrupt()
        for line in idle:
            line.close()
        self._workers.shutdown(cancel_futures=True)

    def _read(self, key: str, filling: _Filling) -> None:
        """Request what is left, and receive it.

        An error of bytes that came outside TLS is an UnavailableError, because an attacker on the network
        may have caused it, so it shows nothing about the peer. Then all further requests stay inside TLS.
        """
        left = filling.left
        request = ReadObject(
            key,
            ObjectRange(left.start, left.stop),
            plain=self._leaves(left),
            background=self._peer.options.background,
        )
        with self._answered(request) as (answer, reply):
            if reply.length_bytes != left.length_bytes:
                raise FormatError(
                    f"bulk: {self._peer} announced {reply.length_bytes} bytes of {key}, "
                    f"expected {left.length_bytes}"
                )
            if not reply.plain:
                filling.take(answer)
                return
            self.left_tls = True
            try:
                answer.line.leave()
                filling.take(answer)
            except (OSError, FormatError) as error:
                raise UnavailableError(
                    f"bulk: reading {key} from {self._peer}: outside TLS: "
                    f"{error or type(error).__name__}"
                ) from error

    def _leaves(self, wanted: ByteRange) -> bool:
        """Return whether this range may come outside TLS. It may do so only once."""
        with self._lock:
            outside = self._outside
            if (
                not self._may_leave
                or wanted.length_bytes < _PLAIN_BYTES
                or not outside.start <= wanted.start
                or not wanted.stop <= outside.stop
            ):
                return False
            self._outside = ByteRange(wanted.stop, outside.stop)
            return True

    @contextmanager
    def _answered(self, request: ReadObject) -> Iterator[tuple[Answer, ReadReply]]:
        """Send a request on an idle connection or a new one, and yield the answer after its reply.

        Any error closes the connection, because bytes of this answer may still arrive on it.
        """
        operation = f"bulk: reading {request.key} from {self._peer}"
        try:
            with self._line() as line:
                answer = Answer(line, self._peer.rate(f"bulk: {request.key}"))
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
                yield answer, reply
                if not reply.plain:
                    with self._lock:
                        if not self._closed:
                            self._idle.append(line)
        except OSError as error:
            self._may_leave = False
            raise connection_error(error, operation) from error
        except BaseException:
            self._may_leave = False
            raise

    @contextmanager
    def _line(self) -> Iterator[Line]:
        """Yield a connection, and close it unless it is idle then. Raises OSError, AccessDeniedError."""
        with self._lock:
            line = self._idle.pop() if self._idle else None
        line = line or self._peer.connected()
        try:
            with self._lock:
                self._busy.add(line)
            self._check_open()
            yield line
        finally:
            with self._lock:
                self._busy.discard(line)
                is_idle = line in self._idle
            if not is_idle:
                line.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(f"bulk: {self._peer}: {CLOSING}")
