"""Client of the bulk protocol: send copies to peers and fetch whole shards. See peer.ranges for ranges.

The functions block, so call them in a bounded pool of threads. Each call opens one connection at a time,
resumes where the last one broke, and fails after a bounded number of attempts.
"""

from __future__ import annotations

import select
import ssl
from collections.abc import Sequence
from dataclasses import replace

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    UnavailableError,
)
from holdfast_core.ids import RestartRound, ShardRef
from holdfast_core.peer.connection import Line, RatedLine, outside_tls
from holdfast_core.peer.data import (
    Piece,
    pieces,
    receive_piece,
    send_outside,
    send_pieces,
    spans_without,
)
from holdfast_core.peer.protocol import (
    BulkFrame,
    BulkOptions,
    Kind,
    Status,
    connection_error,
    raise_reply,
    receive_frame,
    send_frame,
)
from holdfast_core.peer.remote import (
    Peer,
    connect,
    expect_data,
    expect_reply,
    with_attempts,
)
from holdfast_core.peer.table import send_table
from holdfast_core.shards.record import ShardRecord
from holdfast_core.tiers.base import CopyWriter, OpenWriter, ShardReader


def send_copy(
    address: str,
    port: int,
    server_hostname: str,
    ssl_context: ssl.SSLContext,
    round: RestartRound,
    reader: ShardReader,
    *,
    options: BulkOptions | None = None,
) -> int:
    """Copy a shard to a peer, and return when it is durable there. Chunks that the peer has are left out.

    Args:
        address: The peer's IP address.
        server_hostname: The dNSName that the peer's certificate must have.
        round: The restart round of the sender.
        reader: The shard. The caller keeps it open during the call.

    Returns:
        Bytes of the shard file that the successful attempt sent. 0 if the peer had the shard already.

    Raises:
        StaleRoundError: The peer is in a newer round.
        RefusedError: The peer refuses the copy for another reason.
        CapacityError: The peer has no room.
        CorruptionError: The bytes are corrupt on this side, or the peer has refused them as corrupt. The
            caller should verify its own shard.
        AccessDeniedError: A side refuses the other's certificate.
        FormatError: A side violates the protocol.
        UnavailableError: All attempts failed.
    """
    peer = Peer(address, port, server_hostname, ssl_context, options or BulkOptions())
    record = reader.record
    request = BulkFrame(Kind.PUT_COPY, record.ref, round, length=record.file_bytes)
    return with_attempts(peer, lambda plain: _put(peer, replace(request, plain=plain), reader))


def fetch_shard(
    address: str,
    port: int,
    server_hostname: str,
    ssl_context: ssl.SSLContext,
    round: RestartRound,
    ref: ShardRef,
    open_writer: OpenWriter,
    *,
    options: BulkOptions | None = None,
) -> ShardRecord:
    """Fetch a whole shard file from a peer into a writer, and commit it.

    Args:
        address: The peer's IP address.
        server_hostname: The dNSName that the peer's certificate must have.
        round: The restart round of the caller.
        open_writer: Returns the writer. It is called with the ref and the size of the file in bytes.

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
    peer = Peer(address, port, server_hostname, ssl_context, options or BulkOptions())
    writer: CopyWriter | None = None
    outside = False  # whether some of the writer's bytes were received outside TLS

    def attempt(plain: bool) -> ShardRecord:
        nonlocal writer, outside
        offset = 0 if writer is None else writer.offset
        request = BulkFrame(Kind.GET_SHARD, ref, round, offset=offset, plain=plain)
        try:
            with connect(peer) as line:
                rated = peer.rated(line, f"bulk: {ref}")
                send_frame(line.sock, request)
                reply = expect_reply(rated, peer, request)
                if writer is None:
                    writer = open_writer(ref, reply.length)
                outside = outside or reply.plain
                with outside_tls(f"bulk: reading {ref} from {peer}", reply.plain):
                    if reply.plain:
                        _receive_head(line, rated, peer, request, writer)
                    _receive_until(rated, peer, request, writer, reply.length)
            with outside_tls(f"bulk: verifying {ref} from {peer}", outside):
                return writer.commit()
        except UnavailableError as error:
            if writer is not None and isinstance(error.__cause__, CorruptionError):
                writer.abort()
                writer, outside = None, False
            raise

    try:
        return with_attempts(peer, attempt)
    finally:
        if writer is not None:
            writer.abort()


def _put(peer: Peer, request: BulkFrame, reader: ShardReader) -> int:
    with connect(peer) as line:
        send_frame(line.sock, request)
        reply = expect_reply(line.sock, peer, request)
        if reply.status is Status.HAVE:
            return 0
        if reply.offset > request.length:
            raise FormatError(
                f"bulk: {peer} requested to continue at byte {reply.offset} of {request.length}"
            )
        wanted = _wanted(line, peer, request, reader, reply)
        if reply.plain:
            with outside_tls(f"bulk: sending {request.ref} to {peer}", True):
                send_outside(line, request, reader, wanted, peer.throttle)
                line.secure()
        else:
            _send_inside(line.sock, peer, request, reader, wanted)
        line.sock.settimeout(peer.options.reply_seconds)
        expect_reply(line.sock, peer, request)
        return sum(piece.span.length_bytes for piece in wanted)


def _wanted(
    line: Line, peer: Peer, request: BulkFrame, reader: ShardReader, reply: BulkFrame
) -> tuple[Piece, ...]:
    """Return the pieces that the peer lacks: the file from its offset, without chunks of its other shards."""
    have: tuple[range, ...] = ()
    if reply.table:
        send_table(line.sock, request, reader)
        have = expect_reply(line.sock, peer, request).have
    record = reader.record
    spans = spans_without(record, reply.offset, have)
    return tuple(piece for span in spans for piece in pieces(record, span))


def _send_inside(
    sock: ssl.SSLSocket,
    peer: Peer,
    request: BulkFrame,
    reader: ShardReader,
    wanted: Sequence[Piece],
) -> None:
    early = select.poll()
    early.register(sock, select.POLLIN)

    def before(length: int) -> None:
        if early.poll(0):
            # The receiver sends a REPLY before it has all bytes only where it refuses the copy.
            expect_reply(sock, peer, request)
            raise FormatError(f"bulk: {peer} acknowledged {request.ref} before it was sent")
        peer.throttle(length)

    try:
        send_pieces(sock, request, reader, wanted, before)
    except OSError as error:
        _raise_refusal(sock, peer, request)
        raise connection_error(error, f"bulk: sending {request.ref} to {peer}") from error


def _raise_refusal(sock: ssl.SSLSocket, peer: Peer, request: BulkFrame) -> None:
    """Raise the error of a REPLY that the receiver sent before it closed the connection, if there is one."""
    try:
        sock.settimeout(1.0)
        reply = receive_frame(sock)
    except (OSError, FormatError):
        return
    if reply is not None and reply.kind is Kind.REPLY:
        raise_reply(reply, f"bulk: sending {request.ref} to {peer}")


def _receive_head(
    line: Line, rated: RatedLine, peer: Peer, request: BulkFrame, writer: CopyWriter
) -> None:
    """Receive the head of the shard inside TLS, unless the writer has it already. Then leave TLS."""
    if writer.offset == 0:
        _receive_until(rated, peer, request, writer, 1)
    line.leave()


def _receive_until(
    sock: RatedLine, peer: Peer, request: BulkFrame, writer: CopyWriter, stop: int
) -> None:
    """Receive DATA frames until the writer's offset is `stop` or more."""
    while writer.offset < stop:
        frame = expect_data(sock, peer, request)
        length = receive_piece(sock, frame, request, writer)
        sock.taken(length)
        peer.throttle(length)
        writer.advance(length)
