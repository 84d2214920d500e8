"""A peer that sends a byte just before each time-out is given up, whatever it was asked for."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.peer.hostile_peer import HostilePeer, end_of_file, filled, requested, trailer_of
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import ByteRange
from holdfast_core.messages.codec import dumps
from holdfast_core.messages.schema import ReadObject, ReadReply
from holdfast_core.net import TlsFiles
from holdfast_core.pacing import MinimumRate
from holdfast_core.peer.protocol import send_message
from holdfast_core.peer.store import PeerAnswer, PeerStore, copy_shard

SILENCE_SECONDS = 29.0
"""Just less than the longest silence that a connection allows."""


class Slow:
    """A hostile peer, and the clock of its caller. Time passes only between the peer's bytes."""

    def __init__(self, certificates: tuple[TlsFiles, TlsFiles]) -> None:
        tier = ScratchTier()
        self.trailer = trailer_of(tier, filled(tier))
        self.record = self.trailer.record
        self.clock = ManualClock()
        self.hostile = HostilePeer(certificates, self.trailer)
        options = replace(self.hostile.peer.options, attempts=1, clock=self.clock)
        self.peer = replace(self.hostile.peer, options=options)

    def drip(self, sock: socket.socket, content: bytes) -> None:
        """Send ten bytes separately, with a pause before each, and then all the rest."""
        for index in range(10):
            self.clock.advance(SILENCE_SECONDS)
            sock.sendall(content[index : index + 1])
        sock.sendall(content[10:])

    def dripped(self, sock: socket.socket, request: ReadObject) -> None:
        content = requested(request)
        send_message(sock, ReadReply(len(content)))
        self.drip(sock, content)

    def range(self) -> None:
        self.hostile.spans = self.dripped
        with PeerStore(self.peer).open_shard(self.record.ref) as shard:
            next(shard.read([range(0, 8)]))

    def whole(self) -> None:
        self.hostile.spans = self.dripped
        copy_shard(self.peer, self.record.ref, ScratchTier())

    def trailer_bytes(self) -> None:
        def answer(sock: socket.socket, request: ReadObject) -> None:
            content = end_of_file(self.trailer, request)
            send_message(sock, ReadReply(len(content)))
            self.drip(sock, content)

        self.hostile.trailer = answer
        PeerStore(self.peer).open_shard(self.record.ref).close()

    def reply(self) -> None:
        def answer(sock: socket.socket, request: ReadObject) -> None:
            body = dumps(ReadReply(1000))
            self.drip(sock, len(body).to_bytes(4, "big") + body)

        self.hostile.size = answer
        PeerStore(self.peer).open_shard(self.record.ref).close()


@pytest.fixture
def slow(certificates: tuple[TlsFiles, TlsFiles]) -> Iterator[Slow]:
    found = Slow(certificates)
    yield found
    found.hostile.close()


@pytest.mark.parametrize("ask", [Slow.range, Slow.trailer_bytes, Slow.whole, Slow.reply])
def test_a_peer_that_drips_is_given_up(slow: Slow, ask: Callable[[Slow], None]) -> None:
    with pytest.raises(UnavailableError, match=r"only \d+ bytes in \d+\.\d s"):
        ask(slow)


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
    rated = PeerAnswer(
        line, MinimumRate("bulk: a table", clock, clock.monotonic(), 60.0), "a", ByteRange(0, 100)
    )
    began = clock.monotonic()
    with pytest.raises(HoldfastError, match=r"bulk: a table: only 2 bytes in 60\.0 s"):
        for _ in range(10):
            rated.recv_into(memoryview(bytearray(100)))
    assert clock.monotonic() - began == pytest.approx(60.0, abs=0.01)
    assert sock.timeout == 30.0, "the connection's own time-out is as it was"
