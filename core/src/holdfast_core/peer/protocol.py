"""The bulk wire: shards between sidecars, on connections of their own, begun with mutual TLS 1.3.

    frame     fixed binary header (network order), then `meta_bytes` of JSON, then for DATA `length`
              bytes of the shard
    PUT_COPY  request -> REPLY ok with the offset to go on from, or have -> DATA... -> REPLY ok
              (durable at the receiver) or an error. Where the first REPLY asks for the table: DATA
              of the trailer -> REPLY ok with the chunks that the receiver has got from elsewhere,
              which are then left out
    GET_SHARD request with an offset -> REPLY ok with the file's length -> DATA... to its end
    GET_RANGE request with a range of the payload -> REPLY ok -> DATA...
    GET_TABLE request -> REPLY ok with the file's length -> DATA of the trailer

A connection carries one request after the other. An error in the middle ends it: the REPLY says
what was wrong, then the connection is closed. Where request and first REPLY say `plain`, both sides
leave TLS after the head of the shard (see bulk_line); outside, an error has no words.
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
"""Of one DATA frame."""
_SEND_BYTES = 1 << 20
"""Handed to the socket at once: larger slices make TLS no faster, and each must get through within
the time-out."""
MAX_META_BYTES = 64 << 10
MAX_RUNS = 2000
"""Of chunks that one frame names: what MAX_META_BYTES hold."""
SOCKET_BUFFER_BYTES = 4 << 20

_HEADER = struct.Struct("!4sBBHqqqqQQ32sII")
_MAX_FILE_BYTES = 1 << 51
_OPTIONAL_META = frozenset({"refused", "plain", "table", "have"})


class Kind(IntEnum):
    PUT_COPY = 1
    GET_SHARD = 2
    GET_RANGE = 3
    DATA = 4
    REPLY = 5
    GET_TABLE = 6


class Status(IntEnum):
    OK = 0
    HAVE = 1
    """The receiver of a PUT has this very shard, durable."""
    REFUSED = 2
    """The meta is a Refused."""
    CORRUPT = 3
    """The bytes were not what the ref names."""
    FAILED = 4
    """The disk or the network of the other side; trying again may help."""


@dataclass(frozen=True, slots=True)
class BulkFrame:
    """One header with its meta; DATA's bytes are read by `receive_data`."""

    kind: Kind
    ref: ShardRef
    round: RestartRound
    """Of the sender, now: the fence."""
    status: Status = Status.OK
    offset: int = 0
    length: int = 0
    crc32c: int = 0
    refused: Refused | None = None
    plain: bool = False
    """In a request: the caller's job lets payloads travel outside TLS. In its first REPLY: so does
    the server's, and this one does."""
    table: bool = False
    """In the REPLY to a PUT_COPY: send the trailer first."""
    have: tuple[range, ...] = ()
    """In the REPLY to that: chunks that need not be sent, in order, none twice."""


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """How long a side waits and how often it tries; seconds."""

    connect_seconds: float = 5.0
    io_seconds: float = 30.0
    """Without any byte of a DATA frame moving."""
    pace_seconds: float = 60.0
    """For a run of chunks, a chunk table or a whole shard from a peer, and a second more for every
    64 KiB of it."""
    reply_seconds: float = 120.0
    """For the REPLY to a whole copy: the other side's fsync."""
    attempts: int = 4
    plain: bool = False
    """Let payloads travel outside TLS, if the other side's policy says so too. Only the first
    attempt does; what fails is tried again inside."""
    throttle: Callable[[int], None] | None = None
    """Called with the bytes about to be sent or just received; blocks to bound the bandwidth."""
    clock: Clock = field(default_factory=SystemClock)


class Incoming(Protocol):
    """What is read of a connection: its socket, or paced_connection.PacedLine."""

    def recv_into(self, buffer: memoryview, /) -> int: ...


def send_frame(sock: socket.socket, frame: BulkFrame, data: memoryview | None = None) -> None:
    """Send a header and, for DATA, its bytes."""
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
    """The next header; None where the peer closed before it. Raises FormatError, OSError."""
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
    words = _parse_meta(bytes(meta))
    try:
        known_kind, known_status = Kind(kind), Status(status)
    except ValueError as error:
        raise FormatError(f"bulk frame: {error}") from error
    ref = ShardRef(
        words.job_uid,
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
        words.refused,
        words.plain,
        words.table,
        words.have,
    )


def receive_data(
    sock: Incoming, frame: BulkFrame, ref: ShardRef, offset: int, buffer: memoryview
) -> memoryview:
    """The bytes of a DATA frame, in `buffer`. Raises FormatError for anything but the next piece of
    this shard, UnavailableError where the CRC does not match (the transfer goes on elsewhere)."""
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
    """Fill `buffer` wholly. False where the stream ends before its first byte and `may_end`."""
    filled = 0
    while filled < len(buffer):
        count = sock.recv_into(buffer[filled:])
        if count == 0:
            if may_end and filled == 0:
                return False
            raise ConnectionResetError("the other side closed within a frame")
        filled += count
    return True


def tune(sock: socket.socket) -> None:
    """Frames are written whole, and a fast link needs megabytes in flight."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connection_error(error: OSError, tried: str) -> HoldfastError:
    """What a socket's error means: denied by a certificate, or try again."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessDeniedError(f"{tried}: certificate not accepted: {error.verify_message}")
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return AccessDeniedError(f"{tried}: the other side refused our certificate: {error.reason}")
    return UnavailableError(f"{tried}: {error or type(error).__name__}")


def error_reply(request: BulkFrame, error: HoldfastError) -> BulkFrame:
    """The REPLY that carries `error` to the other side."""
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


def raise_reply(reply: BulkFrame, tried: str) -> None:
    """Raise what `error_reply` was given on the other side; nothing for OK and HAVE."""
    if reply.status in (Status.OK, Status.HAVE):
        return
    refused = reply.refused
    words = f"{tried}: {refused.message if refused else reply.status.name}"
    match reply.status:
        case Status.CORRUPT:
            raise CorruptionError(words)
        case Status.FAILED:
            raise UnavailableError(words)
    if refused is None:
        raise FormatError(f"{tried}: refused without a reason")
    match refused.code:
        case Refusal.STALE_ROUND:
            raise StaleRoundError(words, own_round=refused.round, own_version=refused.version)
        case Refusal.NOT_FOUND:
            raise NotFoundError(words)
        case Refusal.NO_SPACE:
            raise CapacityError(words)
        case Refusal.BUSY:
            raise UnavailableError(words)
        case _:
            raise RefusedError(refused.code, words)


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
            raise FormatError(f"bulk frame: have {numbers} is no run of chunks from {low} on")
        runs.append(range(numbers[0], numbers[0] + numbers[1]))
    return tuple(runs)
