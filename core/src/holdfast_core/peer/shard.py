"""Read a peer's shard on one connection: its chunk table first, then parts of its payload.

The peer is not trusted. The table is bound to the digest of the requested shard, and every chunk must match
the table.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Self

from holdfast_core.closing import Closing
from holdfast_core.errors import CorruptionError, FormatError, UnavailableError
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.messages.gang import MAX_SPANS
from holdfast_core.messages.schema import PayloadSpan, ReadReply, ReadShard
from holdfast_core.pacing.minimum_rate import MinimumRate
from holdfast_core.peer.protocol import (
    Attempts,
    Line,
    Peer,
    connection_error,
    raise_refusal,
    receive_into,
    receive_message,
    send_message,
)
from holdfast_core.shards.chunks import FindBad, bad_chunks, payload_span
from holdfast_core.shards.file import Trailer, unpack_trailer
from holdfast_core.shards.stream import check_ref

MAX_TRAILER_BYTES = 256 << 20
"""Largest trailer that is accepted. It suffices for a payload of 1.8 TiB."""
_TRAILER_ROOM_BYTES = 4 << 20
"""Memory for a trailer grows with what has arrived, so that an announcement alone takes no memory."""


@dataclass(frozen=True, slots=True)
class ShardAnswer:
    """Reply and bytes that the peer sends now, at its minimum rate."""

    line: Line
    rate: MinimumRate

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read into `buffer`. Return the number of bytes, or 0 if the peer closed the connection.

        Raises UnavailableError if the peer is too slow, and OSError.
        """
        sock = self.line.sock
        return self.rate.receive(sock, sock.gettimeout(), sock.recv_into, buffer) or 0

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer. Raises what `recv_into` raises, and OSError if the stream ends."""
        receive_into(self, buffer)


class PeerShard(Closing):
    """A shard at a peer, as a tiers.base.ShardSource. Not thread-safe. The owner must close it."""

    def __init__(self, peer: Peer, ref: ShardRef) -> None:
        self._peer = peer
        self._ref = ref
        self._connection: ExitStack | None = None
        self._line: Line | None = None
        self._trailer: Trailer | None = None
        self._allows_plain = peer.options.plain
        self.left_tls = False
        """Whether bytes came outside TLS since `stay_inside`. An attacker may have changed them."""
        self._buffer = memoryview(b"")

    @classmethod
    def open(cls, peer: Peer, ref: ShardRef) -> Self:
        """Connect to the peer and read the shard's trailer.

        Raises:
            NotFoundError: The peer does not have the shard.
            CorruptionError: The peer's copy is corrupt.
            RefusedError: The peer refuses the request.
            AccessDeniedError: A side refuses the other's certificate.
            FormatError: The peer violates the protocol.
            UnavailableError: All attempts failed.
        """
        shard = cls(peer, ref)
        attempts = Attempts(peer.options.attempts)
        try:
            while shard._trailer is None:
                try:
                    shard._trailer = shard._read_trailer()
                except UnavailableError as error:
                    attempts.failed(error)
        except BaseException:
            shard.close()
            raise
        return shard

    @property
    def trailer(self) -> Trailer:
        """See tiers.base.ShardSource."""
        if self._trailer is None:
            raise ValueError("PeerShard: use open()")
        return self._trailer

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See tiers.base.ShardSource."""
        return self._read(wanted, bad_chunks)

    def pieces(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """See store.download.copy.PieceSource."""
        return self._read(wanted, _none_bad)

    def _read(self, wanted: Iterable[range], find_bad: FindBad) -> Generator[memoryview]:
        """Yield the bytes of each run.

        One request names up to MAX_SPANS runs. The peer sends them as fast as they are taken. After a
        broken connection the rest is requested again.
        """
        source = iter(wanted)
        attempts = Attempts(self._peer.options.attempts)
        while left := deque(itertools.islice(source, MAX_SPANS)):
            while left:
                try:
                    with closing(self._read_runs(left, find_bad)) as views:
                        for view in views:
                            attempts.progressed()
                            yield view
                except UnavailableError as error:
                    attempts.failed(error)

    def _read_runs(self, left: deque[range], find_bad: FindBad) -> Generator[memoryview]:
        """Yield the bytes of each run. A run is removed from `left` once `find_bad` has passed its bytes."""
        header = self.trailer.record.header
        spans = [payload_span(header, chunks) for chunks in left]
        with self.answer(spans) as answer:
            for span in spans:
                if len(self._buffer) < span.length_bytes:
                    self._buffer = memoryview(bytearray(span.length_bytes))
                view = self._buffer[: span.length_bytes]
                answer.receive_into(view)
                if bad := list(find_bad(self.trailer, left[0], view)):
                    raise CorruptionError(
                        f"bulk: {self._ref} at {self._peer}: chunks {bad[:8]} do not match its "
                        "chunk table"
                    )
                left.popleft()
                yield view

    @contextmanager
    def answer(self, spans: Sequence[ByteRange]) -> Iterator[ShardAnswer]:
        """Request spans of the payload. The body receives all bytes, in order, as it was answered.

        Any error closes the connection. An error of bytes that came outside TLS is an UnavailableError,
        because an attacker on the network may have caused it, so it shows nothing about the peer or its
        shard. Then the next request stays inside TLS.

        Args:
            spans: At most MAX_SPANS.

        Raises:
            HoldfastError: What `open` raises, and what the body raises.
        """
        options = self._peer.options
        request = ReadShard(
            self._ref,
            tuple(PayloadSpan(span.start, span.stop) for span in spans),
            plain=self._allows_plain,
            background=options.background,
        )
        due = sum(span.length_bytes for span in spans)
        with self._answered(request) as (answer, reply):
            if reply.length_bytes != due:
                raise FormatError(
                    f"bulk: {self._peer} announced {reply.length_bytes} bytes of {self._ref}, "
                    f"expected {due}"
                )
            if not reply.plain:
                yield answer
                return
            self.left_tls = True
            try:
                answer.line.leave()
                yield answer
            except (OSError, FormatError) as error:
                raise UnavailableError(
                    f"bulk: reading {self._ref} from {self._peer}: outside TLS: "
                    f"{error or type(error).__name__}"
                ) from error
            self.close()

    def _read_trailer(self) -> Trailer:
        with self._answered(ReadShard(self._ref)) as (answer, reply):
            if not 0 < reply.length_bytes <= MAX_TRAILER_BYTES:
                raise FormatError(
                    f"bulk: {self._peer} announced a trailer of {reply.length_bytes} bytes of "
                    f"{self._ref}, at most {MAX_TRAILER_BYTES} are accepted"
                )
            found = bytearray()
            while left := reply.length_bytes - len(found):
                room = bytearray(min(left, _TRAILER_ROOM_BYTES))
                answer.receive_into(memoryview(room))
                found += room
            trailer = unpack_trailer(bytes(found))
            check_ref(trailer.record, self._ref)
            return trailer

    @contextmanager
    def _answered(self, request: ReadShard) -> Iterator[tuple[ShardAnswer, ReadReply]]:
        """Send a request on the present connection or a new one, and yield the answer after its reply.

        Any error closes the connection, because bytes of this answer may still arrive on it.
        """
        operation = f"bulk: reading {self._ref} from {self._peer}"
        try:
            line = self._connected()
            answer = ShardAnswer(line, self._peer.rate(f"bulk: {self._ref}"))
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
        except OSError as error:
            self._failed()
            raise connection_error(error, operation) from error
        except BaseException:
            self._failed()
            raise

    def _connected(self) -> Line:
        if self._line is None:
            with ExitStack() as stack:
                self._line = stack.enter_context(self._peer.connected())
                self._connection = stack.pop_all()
        return self._line

    def stay_inside(self) -> None:
        """Keep all further requests inside TLS."""
        self._allows_plain = False
        self.left_tls = False

    def _failed(self) -> None:
        self._allows_plain = False
        self.close()

    def close(self) -> None:
        connection, self._connection, self._line = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def _none_bad(trailer: Trailer, chunks: range, data: memoryview) -> tuple[int, ...]:
    """Verify nothing: the writer of a copy does."""
    return ()
