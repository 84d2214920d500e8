"""A peer as a store that is only read: ranges of its shards, on connections of the bulk protocol.

The peer is not trusted. The caller verifies all bytes, as it does for any store, and a
whole shard is copied by the code that downloads it from a store (store.download).

A copy takes chunks from other shards on the receiver's own disk where it can. The copy is still a whole file
that depends on no other, so pruning, scrubbing and serving treat it like any other. Chunks that need not be
sent save network traffic and the sender's work for TLS.

Only chunks with the same number are compared. Ranks with the same tensors have them at the same offsets,
and so does one rank at different steps. An index of all digests would find more equal chunks, but would
need memory for each stored shard.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.messages.schema import ReadObject, ReadReply
from holdfast_core.pacing import MinimumRate
from holdfast_core.peer.protocol import (
    PIECE_BYTES,
    Attempts,
    Line,
    Peer,
    connection_error,
    raise_refusal,
    receive_message,
    send_message,
)
from holdfast_core.shards.file import (
    DIGEST_BYTES,
    ChunkTable,
    ShardRecord,
    Trailer,
    head_bytes,
    payload_span,
)
from holdfast_core.store.download.shard import (
    Copied,
    EqualRun,
    StoredShardReader,
    copy_file,
    none_bad,
    open_stored_shard,
)
from holdfast_core.store.download.stored import StoredShards
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import CopyWriter, NodeTier, ShardReader
from holdfast_core.tiers.sources import CLOSING

RUN_BYTES = 4 << 20
"""Length of the ranges of a copy. The progress of a copy is reported once for each."""
_AHEAD_BYTES = 1 << 30
"""Largest length of one answer. One answer serves consecutive reads, so that the peer sends while the caller
uses the bytes. Each answer outside TLS needs a connection of its own."""
_PLAIN_BYTES = 2 << 20
"""Shortest range that is worth a connection of its own, which leaving TLS takes."""
_PROGRESS_BYTES = 1 << 20
"""An attempt that received this many bytes resets the count of failed attempts."""


@dataclass(slots=True)
class PeerAnswer:
    """Reply and bytes that the peer sends now, at its minimum rate, for one read or for several."""

    line: Line
    rate: MinimumRate
    key: str
    left: ByteRange
    """The bytes of the object that have not arrived yet."""
    is_plain: bool = False

    @property
    def is_done(self) -> bool:
        return self.left.length_bytes == 0

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read into `buffer`. Return the number of bytes, or 0 if the peer closed the connection.

        Raises UnavailableError if the peer is too slow, and OSError.
        """
        sock = self.line.sock
        return self.rate.receive(sock, sock.gettimeout(), sock.recv_into, buffer) or 0

    def fill(self, buffer: memoryview, stopped: threading.Event | None) -> int:
        """Read some bytes of the object into the buffer and return how many.

        Raises what `recv_into` raises, OSError at an early end, and UnavailableError once `stopped` is set.
        """
        if stopped is not None and stopped.is_set():
            raise UnavailableError("bulk: the bytes are not needed any more")
        count = self.recv_into(buffer[: self.left.length_bytes])
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
        self._rest: PeerAnswer | None = None
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
                answer, length = self._ask(ReadObject(key), ByteRange(0, 0))
                self._ended(answer.line)
                return length
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
                answer = self._answer_of(key, ByteRange(start + filled, start + len(buffer)))
                with self._talking(answer):
                    while not answer.is_done and filled < len(buffer):
                        filled += answer.fill(buffer[filled:], stopped)
                self._keep(answer)
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

    def _answer_of(self, key: str, wanted: ByteRange) -> PeerAnswer:
        """Return the answer that continues with these bytes, or request them.

        Bytes behind them are requested too where the read continues the one before it, or begins the payload.
        """
        with self._lock:
            rest, self._rest = self._rest, None
            payload = self._payload
            is_fresh = payload.start <= wanted.start and wanted.stop <= payload.stop
            if is_fresh:
                self._payload = ByteRange(wanted.stop, payload.stop)
        if rest is not None:
            if (rest.key, rest.left.start) == (key, wanted.start):
                return rest
            self._drop(rest.line)
        stop = wanted.stop
        if is_fresh and wanted.start == payload.start:
            stop = max(stop, min(wanted.start + _AHEAD_BYTES, payload.stop))
        request = ReadObject(
            key,
            ByteRange(wanted.start, stop),
            plain=self._may_leave and is_fresh and wanted.length_bytes >= _PLAIN_BYTES,
            background=self._peer.options.background,
        )
        answer, length = self._ask(request, ByteRange(wanted.start, stop))
        with self._talking(answer):
            if length != answer.left.length_bytes:
                raise FormatError(
                    f"bulk: {self._peer} announced {length} bytes of {key}, "
                    f"expected {answer.left.length_bytes}"
                )
            if answer.is_plain:
                self.left_tls = True
                answer.line.leave()
        return answer

    @contextmanager
    def _talking(self, answer: PeerAnswer) -> Iterator[None]:
        """Close the connection after any error of the body, because bytes may still arrive on it.

        An error of bytes that came outside TLS is an UnavailableError, because an attacker on the network
        may have caused it, so it shows nothing about the peer. After any error all further requests stay
        inside TLS.
        """
        operation = self._reading(answer.key)
        try:
            yield
        except BaseException as error:
            self._may_leave = False
            self._drop(answer.line)
            if answer.is_plain and isinstance(error, OSError | FormatError):
                raise UnavailableError(
                    f"{operation}: outside TLS: {error or type(error).__name__}"
                ) from error
            if isinstance(error, OSError):
                raise connection_error(error, operation) from error
            raise

    def _reading(self, key: str) -> str:
        return f"bulk: reading {key} from {self._peer}"

    def _keep(self, answer: PeerAnswer) -> None:
        """Keep what is left of an answer for the next read."""
        if answer.is_done:
            if answer.is_plain:
                self._drop(answer.line)
            else:
                self._ended(answer.line)
            return
        with self._lock:
            before, self._rest = self._rest, answer
        if before is not None:
            self._drop(before.line)

    def _ask(self, request: ReadObject, wanted: ByteRange) -> tuple[PeerAnswer, int]:
        """Send a request on an idle or a new connection. Return the answer, and the length in its reply."""
        operation = self._reading(request.key)
        line = self._connected(operation)
        rate = self._peer.rate(f"bulk: {request.key}")
        answer = PeerAnswer(line, rate, request.key, wanted)
        with self._talking(answer):
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
        answer.is_plain = reply.plain
        return answer, reply.length_bytes

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


MAX_RUNS = 2047
"""Largest number of runs that one copy takes from this node, because each may cost a request."""
MAX_SOURCES = 16
"""Largest number of shards that one shard is compared with."""


def likely_sources(records: Iterable[ShardRecord], ref: ShardRef) -> tuple[ShardRef, ...]:
    """Return the shards that are likely to contain chunks of `ref`, at most MAX_SOURCES.

    These are the shards of the same checkpoint, then the newest one of the same rank from another checkpoint.
    """
    same: list[ShardRecord] = []
    older: list[ShardRecord] = []
    for record in records:
        if record.ref.job_uid != ref.job_uid:
            continue
        if (record.ref.step, record.ref.round) == (ref.step, ref.round):
            same.append(record)
        elif record.ref.rank == ref.rank:
            older.append(record)
    same.sort(key=lambda record: record.ref.rank)
    older.sort(key=lambda record: (record.ref.step, record.ref.round))
    return tuple(record.ref for record in (*same[: MAX_SOURCES - 1], *older[-1:]))


def equal_runs(
    table: ChunkTable, sources: Sequence[tuple[ShardRef, ChunkTable]], limit: int
) -> tuple[EqualRun, ...]:
    """Return the runs of chunks of `table` that the sources contain, in order and without overlap.

    Args:
        sources: Shards and their tables. If several have a chunk, the first one is used.
        limit: Largest number of runs. If there are more, the longest are returned.
    """
    missing = [range(len(table))]
    runs: list[EqualRun] = []
    for ref, other in sources:
        left: list[range] = []
        for span in missing:
            position = span.start
            for run in _joined(_equal(table.digests, other.digests, span)):
                runs.append(EqualRun(run, ref))
                left.append(range(position, run.start))
                position = run.stop
            left.append(range(position, span.stop))
        missing = [span for span in left if span]
    longest = sorted(runs, key=lambda run: len(run.chunks), reverse=True)[:limit]
    return tuple(sorted(longest, key=lambda run: run.chunks.start))


def _equal(ours: bytes, theirs: bytes, span: range) -> Iterator[range]:
    """Yield the parts of `span` in which the tables are equal. Adjacent parts are not joined.

    Parts that differ are halved and compared again, which is fast where long parts are equal.
    """
    if not span:
        return
    start, stop = span.start * DIGEST_BYTES, span.stop * DIGEST_BYTES
    if ours[start:stop] == theirs[start:stop]:
        yield span
    elif len(span) > 1:
        middle = span.start + len(span) // 2
        yield from _equal(ours, theirs, range(span.start, middle))
        yield from _equal(ours, theirs, range(middle, span.stop))


def _joined(spans: Iterable[range]) -> Iterator[range]:
    """Join adjacent spans."""
    current = range(0)
    for span in spans:
        if current and span.start == current.stop:
            current = range(current.start, span.stop)
            continue
        if current:
            yield current
        current = span
    if current:
        yield current


class LocalChunks(Closing):
    """Open shards of this node that may contain chunks of a shard. The owner must close it."""

    def __init__(self, tier: NodeTier, trailer: Trailer) -> None:
        """Open the shards. `trailer` is that of the shard to copy."""
        self._tier = tier
        self._trailer = trailer
        self._open = contextlib.ExitStack()
        self._readers: dict[ShardRef, ShardReader] = {}
        for source in likely_sources(tier.list_shards(), trailer.record.ref):
            # A missing or corrupt shard is not used as a source. Its own readers report the error.
            with contextlib.suppress(HoldfastError, OSError):
                self._readers[source] = self._open.enter_context(tier.open_shard(source))

    def runs(self, first_chunk: int) -> tuple[EqualRun, ...]:
        """See store.download.shard.LocalSource."""
        header = self._trailer.record.header
        if header.chunk_bytes > PIECE_BYTES:
            return ()
        sources = [
            (ref, reader.table)
            for ref, reader in self._readers.items()
            if reader.record.header.chunk_bytes == header.chunk_bytes
        ]
        # Each run leaves a run before it to request.
        found = equal_runs(self._trailer.table, sources, MAX_RUNS)
        return tuple(run for run in found if run.chunks.start >= first_chunk)

    def take(self, run: EqualRun, writer: CopyWriter, may_go_on: Callable[[], None]) -> bool:
        """See store.download.shard.LocalSource. A source that is damaged is quarantined."""
        header = self._trailer.record.header
        span = payload_span(header, run.chunks)
        step = PIECE_BYTES - PIECE_BYTES % header.chunk_bytes
        for position in range(span.start, span.stop, step):
            may_go_on()
            room = writer.room(min(step, span.stop - position))
            try:
                self._readers[run.source].read_payload_into(position, room)
            except CorruptionError as error:
                self._readers.pop(run.source)
                self._tier.quarantine(run.source, error)
                return False
            writer.advance(len(room))
        return True

    def close(self) -> None:
        self._open.close()


def copy_shard(
    peer: Peer, ref: ShardRef, tier: NodeTier, may_go_on: Callable[[], None] = lambda: None
) -> Copied:
    """Copy a shard from a peer to the node tier. It is verified and durable when this returns.

    Blocks. After a broken connection the copy continues where it stopped.

    Args:
        peer: The peer.
        ref: The shard. The node tier does not hold it.
        tier: The node tier of this node.
        may_go_on: Called before each piece and before the commit. An error that it raises ends the copy.

    Raises:
        NotFoundError: The peer does not have the shard.
        CorruptionError: The peer's copy is corrupt. Another source may have a good one.
        RefusedError: The peer refuses the request.
        CapacityError: The shard does not fit on this node.
        AccessDeniedError: A side refuses the other's certificate.
        FormatError: The peer violates the protocol.
        UnavailableError: All attempts failed.

    After an error no part of the copy remains.
    """
    attempts = Attempts(peer.options.attempts)
    store = PeerStore(peer)
    with store.open_shard(ref) as shard, LocalChunks(tier, shard.trailer) as local:
        while True:
            # A copy that a change outside TLS has damaged starts again, inside TLS.
            try:
                return copy_file(shard, tier.begin_copy, RUN_BYTES, local, may_go_on)
            except CorruptionError as error:
                if not store.left_tls:
                    raise
                store.stay_inside()
                attempts.failed(UnavailableError(f"bulk: {ref} from {peer}: outside TLS: {error}"))
