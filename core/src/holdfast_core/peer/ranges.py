"""Read ranges of a peer's shard on one connection: first its chunk table, then whole chunks.

The peer is not trusted. The table is bound to the digest of the requested shard, and every chunk must match
the table. (In shards of version 1 the caller compares the table's digest with the manifest's.) Ranges always
stay inside TLS, because only restores read them, and they are few compared with the copies of every step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.ids import RestartRound, ShardRef
from holdfast_core.peer.connection import Line, RatedLine
from holdfast_core.peer.protocol import (
    MAX_DATA_BYTES,
    BulkFrame,
    Kind,
    connection_error,
    receive_data,
    send_frame,
)
from holdfast_core.peer.remote import (
    Peer,
    connect,
    expect_data,
    expect_reply,
    with_attempts,
)
from holdfast_core.peer.table import receive_table
from holdfast_core.shards.chunks import bad_chunks, payload_span
from holdfast_core.shards.file import Trailer

_AHEAD = 4
"""Largest number of requests sent ahead, so that the peer always has the next one."""


class PeerShard:
    """A shard at a peer, as a tiers.base.ShardSource. Not thread-safe. The owner must close it."""

    def __init__(self, peer: Peer, round: RestartRound, ref: ShardRef) -> None:
        self._peer = peer
        self._round = round
        self._ref = ref
        self._connection: ExitStack | None = None
        self._line: Line | None = None
        self._requested = 0
        """Number of runs that were requested on this connection and are not received yet."""
        self._trailer: Trailer | None = None
        self._buffer = memoryview(b"")

    @classmethod
    def open(cls, peer: Peer, round: RestartRound, ref: ShardRef) -> Self:
        """Connect to the peer and read the shard's trailer.

        Args:
            round: The restart round of the caller.

        Raises:
            NotFoundError: The peer does not have the shard.
            CorruptionError: The peer's copy is corrupt.
            RefusedError: The peer refuses the request.
            AccessDeniedError: A side refuses the other's certificate.
            FormatError: The peer violates the protocol.
            UnavailableError: All attempts failed.
        """
        shard = cls(peer, round, ref)
        try:
            with_attempts(peer, lambda _plain: shard._read_table())
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
        """See tiers.base.ShardSource.

        A broken connection is opened again, and the incomplete run is requested again. BulkOptions.attempts
        limits the attempts for each run.
        """
        source = iter(wanted)
        waiting: deque[range] = deque()
        try:
            while True:
                waiting.extend(itertools.islice(source, _AHEAD - len(waiting)))
                if not waiting:
                    return
                view = with_attempts(self._peer, lambda _plain: self._first_of(waiting))
                self._expect(waiting.popleft(), view)
                yield view
        finally:
            if self._requested:
                self.close()  # the connection still carries replies to requests sent ahead

    def close(self) -> None:
        connection, self._connection, self._line = self._connection, None, None
        self._requested = 0
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ one attempt

    def _read_table(self) -> None:
        request = BulkFrame(Kind.GET_TABLE, self._ref, self._round)
        with self._conversation() as line:
            rated = self._peer.rated(line, f"bulk: chunk table of {self._ref}")
            send_frame(line.sock, request)
            reply = expect_reply(rated, self._peer, request)
            self._trailer = receive_table(rated, request, reply.length)

    def _first_of(self, waiting: deque[range]) -> memoryview:
        """Request all runs that are not requested yet, and return the bytes of the first one."""
        with self._conversation() as line:
            rated = self._peer.rated(line, f"bulk: chunks of {self._ref}")
            for chunks in tuple(waiting)[self._requested :]:
                send_frame(line.sock, self._request(chunks))
                self._requested += 1
            view = self._receive(rated, waiting[0])
            self._requested -= 1
            return view

    def _request(self, chunks: range) -> BulkFrame:
        span = payload_span(self.trailer.record.header, chunks)
        return BulkFrame(
            Kind.GET_RANGE, self._ref, self._round, offset=span.start, length=span.length_bytes
        )

    def _receive(self, sock: RatedLine, chunks: range) -> memoryview:
        request = self._request(chunks)
        chunk_bytes = self.trailer.record.header.chunk_bytes
        expect_reply(sock, self._peer, request)
        if len(self._buffer) < request.length:
            self._buffer = memoryview(bytearray(request.length))
        view = self._buffer[: request.length]
        position = 0
        while position < len(view):
            frame = expect_data(sock, self._peer, request)
            room = view[position : position + MAX_DATA_BYTES]
            due = min(chunk_bytes - position % chunk_bytes, len(room))
            if frame.kind is Kind.DATA and frame.length < due:
                # A correct peer sends whole chunks. Frames of a few bytes would keep this node busy.
                raise FormatError(
                    f"bulk: {frame.length} bytes of {self._ref} from {self._peer} at "
                    f"{request.offset + position}, expected {due} or more"
                )
            data = receive_data(sock, frame, self._ref, request.offset + position, room)
            self._peer.throttle(len(data))
            position += len(data)
        return view

    def _expect(self, chunks: range, view: memoryview) -> None:
        bad = bad_chunks(self.trailer, chunks, view)
        if bad:
            raise CorruptionError(
                f"bulk: {self._ref} at {self._peer}: chunks {bad[:8]} do not match its chunk table"
            )

    @contextlib.contextmanager
    def _conversation(self) -> Iterator[Line]:
        """Yield the present connection, or a new one.

        Any error closes it, because replies to earlier requests may still arrive on it.
        """
        try:
            if self._connection is None or self._line is None:
                self._connection = ExitStack()
                self._line = self._connection.enter_context(connect(self._peer))
            yield self._line
        except OSError as error:
            self.close()
            raise connection_error(error, f"bulk: reading {self._ref} from {self._peer}") from error
        except BaseException:
            self.close()
            raise
