"""A peer that sends a byte just before each time-out is given up, whatever it was asked for."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.core.peer.hostile_peer import (
    DATA,
    Answer,
    HostilePeer,
    data,
    filled,
    head_of_data,
    ok,
    table_of,
)
from tests.support.tiers.memory import MemoryTier

from holdfast_core.clock import ManualClock
from holdfast_core.errors import FormatError, HoldfastError, UnavailableError
from holdfast_core.ids import ByteRange
from holdfast_core.net.tls import TlsFiles
from holdfast_core.pacing.minimum_rate import MinimumRate
from holdfast_core.peer.client import fetch_shard
from holdfast_core.peer.connection import RatedLine
from holdfast_core.peer.protocol import BulkFrame, Kind, send_frame
from holdfast_core.peer.ranges import PeerShard
from holdfast_core.shards.file import Trailer, pack_trailer, trailer_offset

SILENCE_SECONDS = 29.0
"""Just less than the longest silence that a connection allows."""


class Slow:
    """A hostile peer, and the clock of its caller. Time passes only between the peer's bytes."""

    def __init__(self, certificates: tuple[TlsFiles, TlsFiles]) -> None:
        self.tier = MemoryTier()
        self.record = filled(self.tier)
        self.clock = ManualClock()
        self.hostile = HostilePeer(certificates, self.record)
        options = replace(self.hostile.peer.options, attempts=1, clock=self.clock)
        self.peer = replace(self.hostile.peer, options=options)
        with self.tier.open_shard(self.record.ref) as reader:
            self.trailer = Trailer(self.record, reader.table)
            span = ByteRange(0, self.record.file_bytes)
            self.file = b"".join(bytes(view) for view in reader.read_file([span]))
        self.hostile.answers[Kind.GET_TABLE] = table_of(self.trailer)

    def drip(self, sock: socket.socket, content: bytes) -> None:
        """Send ten bytes separately, with a pause before each, and then all the rest."""
        for index in range(10):
            self.clock.advance(SILENCE_SECONDS)
            sock.sendall(content[index : index + 1])
        sock.sendall(content[10:])

    def open(self) -> PeerShard:
        return PeerShard.open(self.peer, self.hostile.round, self.record.ref)

    def range(self) -> None:
        def answer(sock: socket.socket, request: BulkFrame) -> None:
            ok(sock, request)
            content = DATA[request.offset : request.offset + request.length]
            send_frame(sock, head_of_data(request, request.offset, content))
            self.drip(sock, content)

        self.hostile.answers[Kind.GET_RANGE] = answer
        with self.open() as shard:
            next(shard.read([range(0, 8)]))

    def table(self) -> None:
        record, packed = self.record, self.packed()

        def answer(sock: socket.socket, request: BulkFrame) -> None:
            reply = BulkFrame(Kind.REPLY, request.ref, request.round, length=record.file_bytes)
            send_frame(sock, reply)
            send_frame(sock, head_of_data(request, trailer_offset(record.header), packed))
            self.drip(sock, packed)

        self.hostile.answers[Kind.GET_TABLE] = answer
        self.open().close()

    def whole(self) -> None:
        def answer(sock: socket.socket, request: BulkFrame) -> None:
            size = self.record.file_bytes
            send_frame(sock, BulkFrame(Kind.REPLY, request.ref, request.round, length=size))
            send_frame(sock, head_of_data(request, 0, self.file))
            self.drip(sock, self.file)

        self.fetch(answer)

    def whole_in_frames_of_a_byte(self) -> None:
        def answer(sock: socket.socket, request: BulkFrame) -> None:
            size = self.record.file_bytes
            send_frame(sock, BulkFrame(Kind.REPLY, request.ref, request.round, length=size))
            for index in range(2000):
                data(sock, request, index, self.file[index : index + 1])
            assert taken.wait(60)
            # Too long for 2000 bytes alone, but not for 2000 frames with their headers.
            self.clock.advance(63.0)
            data(sock, request, 2000, self.file[2000:])

        frames = itertools.count(1)
        taken = threading.Event()

        def count(length: int) -> None:
            if next(frames) == 2000:
                taken.set()

        self.peer = replace(self.peer, options=replace(self.peer.options, throttle=count))
        self.fetch(answer)

    def fetch(self, answer: Answer) -> None:
        self.hostile.answers[Kind.GET_SHARD] = answer
        peer = self.peer
        fetch_shard(
            peer.address,
            peer.port,
            peer.server_hostname,
            peer.ssl_context,
            self.hostile.round,
            self.record.ref,
            MemoryTier().begin_copy,
            options=peer.options,
        )

    def packed(self) -> bytes:
        return pack_trailer(self.record.header, self.record.blake3, self.trailer.table)


@pytest.fixture
def slow(certificates: tuple[TlsFiles, TlsFiles]) -> Iterator[Slow]:
    found = Slow(certificates)
    yield found
    found.hostile.close()


@pytest.mark.parametrize(
    "ask", [Slow.range, Slow.table, Slow.whole, Slow.whole_in_frames_of_a_byte]
)
def test_a_peer_that_drips_is_given_up(slow: Slow, ask: Callable[[Slow], None]) -> None:
    with pytest.raises(UnavailableError, match=r"only \d+ bytes in \d+\.\d s"):
        ask(slow)


def test_frames_of_less_than_a_chunk_are_refused(slow: Slow) -> None:
    """The receiver processes each frame separately: frames of a byte would keep this node busy at any
    speed."""

    def answer(sock: socket.socket, request: BulkFrame) -> None:
        ok(sock, request)
        data(sock, request, request.offset, DATA[request.offset :][:1])
        rest = DATA[request.offset + 1 : request.offset + request.length]
        data(sock, request, request.offset + 1, rest)

    slow.hostile.answers[Kind.GET_RANGE] = answer
    with slow.open() as shard, pytest.raises(FormatError, match=r"1 bytes of .* expected 65536"):
        next(shard.read([range(0, 2)]))


def test_a_table_in_small_pieces_is_refused(slow: Slow) -> None:
    """Each piece would take the buffer of a whole table."""
    record, packed = slow.record, slow.packed()

    def answer(sock: socket.socket, request: BulkFrame) -> None:
        reply = BulkFrame(Kind.REPLY, request.ref, request.round, length=record.file_bytes)
        send_frame(sock, reply)
        start = trailer_offset(record.header)
        data(sock, request, start, packed[:1])
        data(sock, request, start + 1, packed[1:])

    slow.hostile.answers[Kind.GET_TABLE] = answer
    with pytest.raises(FormatError, match=f"1 bytes of the trailer .* expected {len(packed)}"):
        slow.open()


class Trickle:
    """A socket whose reads each take the longest time that is allowed and return one byte."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.timeout = 30.0

    def gettimeout(self) -> float:
        return self.timeout

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def recv_into(self, buffer: memoryview) -> int:
        if self.timeout < SILENCE_SECONDS:
            self.clock.advance(self.timeout)
            raise TimeoutError("the read operation timed out")
        self.clock.advance(SILENCE_SECONDS)
        return 1


def test_a_read_waits_no_longer_than_the_pace_allows() -> None:
    clock = ManualClock()
    sock = Trickle(clock)
    line: Any = SimpleNamespace(sock=sock)
    rated = RatedLine(line, MinimumRate("bulk: a table", clock, clock.monotonic(), 60.0))
    began = clock.monotonic()
    with pytest.raises(HoldfastError, match=r"bulk: a table: only 2 bytes in 60\.0 s"):
        for _ in range(10):
            rated.recv_into(memoryview(bytearray(100)))
    assert clock.monotonic() - began == pytest.approx(60.0, abs=0.01)
    assert sock.timeout == 30.0, "the connection's own time-out is as it was"
