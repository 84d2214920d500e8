"""Frames of the bulk protocol, which moves shards between sidecars. Connections start with mutual TLS 1.3.

    frame     fixed binary header in network order, then `meta_bytes` of JSON, then, for DATA, `length`
              bytes of the shard
    PUT_COPY  request -> REPLY OK with the offset to continue from, or HAVE -> DATA... -> REPLY OK
              (durable at the receiver) or an error. If the first REPLY asks for the table: DATA of the
              trailer -> REPLY OK with the chunks that the receiver has in other shards, which the
              sender then leaves out
    GET_SHARD request with an offset -> REPLY OK with the file's length -> DATA... to its end
    GET_RANGE request with a range of the payload -> REPLY OK -> DATA...
    GET_TABLE request -> REPLY OK with the file's length -> DATA of the trailer

A connection carries one request after another. After an error the server sends a REPLY with the reason and
closes the connection. If the request and the first REPLY have `plain` set, both sides leave TLS after the
head of the shard (see peer.connection). Outside TLS the server closes the connection without a REPLY.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import loads_strict
from holdfast_core.format.checks import (
    expect_int,
    expect_ints,
    expect_list,
    expect_object,
    expect_text,
)
from holdfast_core.format.digest import PREFIX, crc32c, hex_of
from holdfast_core.format.keys import MAX_RANK, MAX_ROUND, MAX_STEP, checked_job_uid
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, ShardRef, Step
from holdfast_core.messages.codec import from_json, to_json
from holdfast_core.messages.schema import Refusal, Refused

MAGIC = b"HFBK"
VERSION = 1
MAX_DATA_BYTES = 4 << 20
"""Largest payload of one DATA frame."""
_SEND_BYTES = 1 << 20
"""Bytes of one call to the socket. Larger slices do not make TLS faster, and the socket's time-out applies to
each slice."""
MAX_META_BYTES = 64 << 10
MAX_RUNS = 2000
"""Largest number of runs of chunks in one frame. They fit into MAX_META_BYTES."""
SOCKET_BUFFER_BYTES = 4 << 20

_HEADER = struct.Struct("!4sBBHqqqqQQ32sII")
_MAX_FILE_BYTES = 1 << 51
_OPTIONAL_META = frozenset({"refused", "plain", "table", "have"})


class Kind(IntEnum):
    """Kind of a frame."""

    PUT_COPY = 1
    GET_SHARD = 2
    GET_RANGE = 3
    DATA = 4
    REPLY = 5
    GET_TABLE = 6


class Status(IntEnum):
    """Status of a REPLY."""

    OK = 0
    HAVE = 1
    """The receiver of a PUT_COPY has a durable copy of this shard already."""
    REFUSED = 2
    """`refused` names the reason."""
    CORRUPT = 3
    """The received bytes, or the server's own copy, do not have the digest in the ref."""
    FAILED = 4
    """The server's disk or network failed. Another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class BulkFrame:
    """Header and meta of one frame. `receive_data` reads the bytes of a DATA frame."""

    kind: Kind
    ref: ShardRef
    round: RestartRound
    """The caller's restart round. The server accepts copies only in its own round (R17)."""
    status: Status = Status.OK
    offset: int = 0
    length: int = 0
    crc32c: int = 0
    refused: Refused | None = None
    plain: bool = False
    """In a request: the caller allows the payload outside TLS. In the first REPLY: the server allows it, too,
    and this payload is sent outside TLS."""
    table: bool = False
    """In the first REPLY to a PUT_COPY: the sender must send the trailer first."""
    have: tuple[range, ...] = ()
    """In the REPLY to that trailer: chunks that the sender leaves out, in order and without overlap."""


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """Time-outs and other options of the calling side."""

    connect_seconds: float = 5.0
    """Time-out of the TCP connection, and also of its first TLS handshake."""
    io_seconds: float = 30.0
    """Time-out of each wait for the socket after that."""
    grace_seconds: float = 60.0
    """Time for one answer: a run of chunks, a chunk table or a whole shard. One more second is added for
    each 64 KiB of it."""
    reply_seconds: float = 120.0
    """Time-out of the REPLY to a whole copy, which the receiver sends after its fsync."""
    attempts: int = 4
    plain: bool = False
    """Allow the payload outside TLS, if the other side's policy allows it, too. Only the first attempt leaves
    TLS; later ones stay inside."""
    throttle: Callable[[int], None] | None = None
    """Called with the number of bytes about to be sent or just received. It blocks to limit the rate."""
    clock: Clock = field(default_factory=SystemClock)


class Incoming(Protocol):
    """Readable side of a connection: its socket, or a connection.RatedLine."""

    def recv_into(self, buffer: memoryview, /) -> int: ...


def send_frame(sock: socket.socket, frame: BulkFrame, data: memoryview | None = None) -> None:
    """Send a header and, for a DATA frame, its bytes. Raises OSError."""
    meta = _meta(frame)
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        frame.kind,
        frame.status,
        frame.round,
        frame.ref.step,
        frame.ref.round,
        frame.ref.rank,
        frame.offset,
        frame.length,
        bytes.fromhex(hex_of(frame.ref.blake3)),
        frame.crc32c,
        len(meta),
    )
    sock.sendall(header + meta)
    if data is not None:
        for start in range(0, len(data), _SEND_BYTES):
            sock.sendall(data[start : start + _SEND_BYTES])


def receive_frame(sock: Incoming) -> BulkFrame | None:
    """Read the next header and meta. Return None if the peer closed the connection before them.

    Raises FormatError, OSError.
    """
    raw = bytearray(_HEADER.size)
    if not receive_into(sock, memoryview(raw), may_end=True):
        return None
    magic, version, kind, status, *numbers, digest, crc, meta_bytes = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise FormatError(f"bulk frame: magic {magic!r} version {version}, expected {MAGIC!r} 1")
    if meta_bytes > MAX_META_BYTES:
        raise FormatError(f"bulk frame: meta of {meta_bytes} bytes, at most {MAX_META_BYTES}")
    meta = bytearray(meta_bytes)
    receive_into(sock, memoryview(meta))
    round_, step, step_round, rank, offset, length = numbers
    text = _parse_meta(bytes(meta))
    try:
        known_kind, known_status = Kind(kind), Status(status)
    except ValueError as error:
        raise FormatError(f"bulk frame: {error}") from error
    ref = ShardRef(
        text.job_uid,
        Step(expect_int(step, "bulk frame: step", high=MAX_STEP)),
        RestartRound(expect_int(step_round, "bulk frame: step's round", high=MAX_ROUND)),
        Rank(expect_int(rank, "bulk frame: rank", high=MAX_RANK)),
        Digest(PREFIX + digest.hex()),
    )
    return BulkFrame(
        known_kind,
        ref,
        RestartRound(expect_int(round_, "bulk frame: round", high=MAX_ROUND)),
        known_status,
        expect_int(offset, "bulk frame: offset", high=_MAX_FILE_BYTES),
        expect_int(length, "bulk frame: length", high=_MAX_FILE_BYTES),
        crc,
        text.refused,
        text.plain,
        text.table,
        text.have,
    )


def receive_data(
    sock: Incoming, frame: BulkFrame, ref: ShardRef, offset: int, buffer: memoryview
) -> memoryview:
    """Read the bytes of a DATA frame into `buffer`.

    Args:
        frame: The header, from `receive_frame`.
        ref: The expected shard.
        offset: The expected offset.

    Returns:
        The filled part of `buffer`.

    Raises:
        FormatError: The frame is not the next DATA frame of this shard, or does not fit into `buffer`.
        UnavailableError: The CRC32C does not match, so the bytes were damaged in transit.
        OSError: The connection failed.
    """
    if frame.kind is not Kind.DATA or frame.ref != ref or frame.offset != offset:
        raise FormatError(
            f"bulk: {frame.kind.name} of {frame.ref} at {frame.offset}, expected DATA of {ref} "
            f"at {offset}"
        )
    if not 0 < frame.length <= len(buffer):
        raise FormatError(f"bulk: DATA of {frame.length} bytes, expected 1..{len(buffer)}")
    data = buffer[: frame.length]
    receive_into(sock, data)
    if crc32c(data) != frame.crc32c:
        raise UnavailableError(f"bulk: DATA of {ref} at {offset}: CRC32C differs on arrival")
    return data


def receive_into(sock: Incoming, buffer: memoryview, *, may_end: bool = False) -> bool:
    """Fill the whole `buffer`.

    Args:
        may_end: Return False if the stream ends before the first byte, instead of raising an error.

    Raises:
        OSError: The connection failed or ended early.
    """
    filled = 0
    while filled < len(buffer):
        count = sock.recv_into(buffer[filled:])
        if count == 0:
            if may_end and filled == 0:
                return False
            raise ConnectionResetError("the peer closed the connection within a frame")
        filled += count
    return True


def tune(sock: socket.socket) -> None:
    """Set the socket options of a bulk connection: no delay, large buffers for a fast network, keep-alive."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connection_error(error: OSError, operation: str) -> HoldfastError:
    """Return AccessDeniedError if a side has refused the other's certificate, otherwise UnavailableError.

    Args:
        tried: What was tried, for the error text.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessDeniedError(
            f"{operation}: the certificate of the peer was not accepted: {error.verify_message}"
        )
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return AccessDeniedError(
            f"{operation}: the peer refused the certificate of this side: {error.reason}"
        )
    return UnavailableError(f"{operation}: {error or type(error).__name__}")


def error_reply(request: BulkFrame, error: HoldfastError) -> BulkFrame:
    """Return the REPLY that carries `error` to the caller."""
    code: Refusal | None = None
    round_, version = request.round, 0
    match error:
        case StaleRoundError():
            code, version = Refusal.STALE_ROUND, error.own_version
            round_ = RestartRound(error.own_round)
        case RefusedError():
            code = Refusal(error.code)
        case NotFoundError():
            code = Refusal.NOT_FOUND
        case CapacityError():
            code = Refusal.NO_SPACE
        case CorruptionError():
            return _failed(request, Status.CORRUPT, round_, str(error))
        case FormatError():
            code = Refusal.BAD_REQUEST
        case _:
            return _failed(request, Status.FAILED, round_, str(error))
    refused = Refused(code, str(error)[:2000], round_, version)
    return BulkFrame(Kind.REPLY, request.ref, round_, Status.REFUSED, refused=refused)


def raise_reply(reply: BulkFrame, operation: str) -> None:
    """Raise the error that a REPLY carries. Do nothing for OK and HAVE.

    Raises:
        CorruptionError: The received bytes, or the server's own copy, are corrupt.
        StaleRoundError: The caller's round is too old.
        NotFoundError: The server does not have the shard.
        CapacityError: The server has no room for the copy.
        UnavailableError: The server is busy, or its disk or network failed.
        RefusedError: Another refusal.
        FormatError: The REPLY is a refusal without a reason.
    """
    if reply.status in (Status.OK, Status.HAVE):
        return
    refused = reply.refused
    text = f"{operation}: {refused.message if refused else reply.status.name}"
    match reply.status:
        case Status.CORRUPT:
            raise CorruptionError(text)
        case Status.FAILED:
            raise UnavailableError(text)
    if refused is None:
        raise FormatError(f"{operation}: refused without a reason")
    match refused.code:
        case Refusal.STALE_ROUND:
            raise StaleRoundError(text, own_round=refused.round, own_version=refused.version)
        case Refusal.NOT_FOUND:
            raise NotFoundError(text)
        case Refusal.NO_SPACE:
            raise CapacityError(text)
        case Refusal.BUSY:
            raise UnavailableError(text)
        case _:
            raise RefusedError(refused.code, text)


def _failed(request: BulkFrame, status: Status, round_: RestartRound, message: str) -> BulkFrame:
    refused = Refused(Refusal.BUSY, message[:2000], round_)
    return BulkFrame(Kind.REPLY, request.ref, round_, status, refused=refused)


def _meta(frame: BulkFrame) -> bytes:
    if frame.kind is Kind.DATA:
        return b'{"jobUid":"' + frame.ref.job_uid.encode() + b'"}'
    value: dict[str, Any] = {"jobUid": frame.ref.job_uid}
    if frame.refused is not None:
        value["refused"] = to_json(frame.refused)
    if frame.plain:
        value["plain"] = True
    if frame.table:
        value["table"] = True
    if frame.have:
        value["have"] = [[run.start, len(run)] for run in frame.have]
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class _Meta:
    job_uid: JobUid
    refused: Refused | None
    plain: bool
    table: bool
    have: tuple[range, ...]


def _parse_meta(data: bytes) -> _Meta:
    value = loads_strict(data, "bulk frame", limit_bytes=MAX_META_BYTES)
    optional = _OPTIONAL_META & set(value) if isinstance(value, dict) else set()
    root = expect_object(value, "bulk frame", frozenset({"jobUid"} | optional))
    job_uid = JobUid(expect_text(root["jobUid"], "bulk frame: jobUid", limit=128))
    return _Meta(
        checked_job_uid(job_uid),
        from_json(Refused, root["refused"]) if "refused" in root else None,
        _flag(root, "plain"),
        _flag(root, "table"),
        _runs(root.get("have", [])),
    )


def _flag(root: dict[str, Any], name: str) -> bool:
    value = root.get(name, False)
    if not isinstance(value, bool):
        raise FormatError(f"bulk frame: {name} is {value!r}, expected true or false")
    return value


def _runs(value: Any) -> tuple[range, ...]:
    runs: list[range] = []
    for item in expect_list(value, "bulk frame: have", limit=MAX_RUNS):
        numbers = expect_ints(item, "bulk frame: have", limit=2)
        low = runs[-1].stop if runs else 0
        if len(numbers) != 2 or numbers[0] < low or numbers[1] < 1:
            raise FormatError(f"bulk frame: have {numbers} is not a run of chunks from {low} on")
        runs.append(range(numbers[0], numbers[0] + numbers[1]))
    return tuple(runs)
