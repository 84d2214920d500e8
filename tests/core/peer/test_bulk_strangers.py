"""Callers without a certificate and silent members block no other caller and occupy few connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.peer.bulk_pair import CLIENT, Handler, Pair, filled, started
from tests.support.servers.flood import flood
from tests.support.tiers.scratch import ScratchTier
from tests.support.trainer.launched import until

from holdfast_core.errors import RefusedError
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange
from holdfast_core.messages.schema import ReadObject, ReadReply, Refusal
from holdfast_core.net import ConnectionLimits, TlsFiles, client_context
from holdfast_core.peer.protocol import PIECE_BYTES, receive_message, send_message
from holdfast_core.peer.server import BulkLimits
from holdfast_core.peer.store import copy_shard

HOUR = 3600.0
"""Time-outs that are too long for any test, so that no connection ends because of the time."""


@contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS))
            for _ in range(count)
        ]


def serving(certificates: tuple[TlsFiles, TlsFiles], limits: BulkLimits) -> Iterator[Pair]:
    yield from started(certificates, ScratchTier(), limits)


def copies(pair: Pair, size: int = 200_000) -> bool:
    """Return whether a member's copy of a shard succeeds."""
    record = filled(pair.tier, size)
    return pair.copy(ScratchTier(), record.ref).record == record


def until_replaced_ones_end(pair: Pair) -> None:
    """Wait until all connections are 128 strangers, and at most one member."""
    until(lambda: pair.server.connections <= 128 + 1, "few connections")


@pytest.mark.fault("Silent strangers connect to the bulk port from a member's address")
def test_silent_connections_do_not_stop_replication(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    """All silent connections come from the member's own address and never time out."""
    for pair in serving(certificates, BulkLimits(handshake_seconds=HOUR)):
        with silent(pair.port, 400):
            assert copies(pair)
            until_replaced_ones_end(pair)


def test_a_flood_from_another_process_stops_no_replication(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    limits = BulkLimits(ConnectionLimits(authenticated=8), handshake_seconds=HOUR)
    for pair in serving(certificates, limits):
        with flood(pair.port):
            for _ in range(5):
                assert copies(pair)
                assert pair.server.connections <= 128 + 8 + 64, "64 of them are ending"


@pytest.mark.fault("A stranger sends half a ClientHello to the bulk port")
def test_connections_with_half_a_hello_do_not_stop_replication(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    for pair in serving(certificates, BulkLimits(handshake_seconds=HOUR)):
        with silent(pair.port, 200) as sockets:
            for sock in sockets:
                with contextlib.suppress(OSError):  # the server may have dropped it already
                    sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            assert copies(pair)


def test_an_unauthenticated_connection_is_closed_after_its_time(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    for pair in serving(certificates, BulkLimits(handshake_seconds=0.2)):
        with silent(pair.port, 8) as sockets:
            assert [sock.recv(1) for sock in sockets] == [b""] * 8


@pytest.mark.fault("No thread can be started for a bulk connection")
def test_a_connection_that_no_thread_can_serve_ends_alone(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    """For a moment no thread can be started, as when the trainer has used up the pod's processes."""
    for pair in serving(certificates, BulkLimits()):
        usual = threading.stack_size(1 << 47)
        try:
            with silent(pair.port, 1) as (sock,), contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        finally:
            threading.stack_size(usual)
        assert copies(pair, 1000)


@pytest.mark.fault("Members connect and are silent")
def test_silent_members_delay_no_request(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    """The silent connections have a certificate. There is one more of them than requests may run at a
    time."""
    limits = BulkLimits(requests=2, idle_seconds=HOUR)
    for pair in serving(certificates, limits):
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(pair.peer().connected())
            assert copies(pair)


def test_a_member_that_reads_nothing_delays_no_other_member(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    """It has as many requests as may run at a time, and no wait for the socket times out."""
    reading = threading.Event()

    class Reading(Handler):
        def authorize(self, peer_dns_name: str, key: str) -> None:
            reading.set()

    limits = BulkLimits(requests=2, io_seconds=HOUR, idle_seconds=HOUR)
    for pair in started(certificates, ScratchTier(), limits, Reading()):
        record = filled(pair.tier)
        large = filled(pair.tier, 64 << 20, step=11)
        request = ReadObject(node_key(large.ref), ByteRange(0, large.file_bytes))
        with ExitStack() as stack:
            for _ in range(2):
                line = stack.enter_context(pair.peer().connected())
                send_message(line.sock, request)
            reading.wait()
            # The server's own certificate stands for another member.
            other = replace(pair, client=client_context(certificates[0]))
            assert other.copy(ScratchTier(), record.ref).record == record


def test_connections_of_a_member_are_bounded(certificates: tuple[TlsFiles, TlsFiles]) -> None:
    limits = BulkLimits(connections=ConnectionLimits(per_caller=3), idle_seconds=HOUR)
    for pair in serving(certificates, limits):
        with ExitStack() as stack:
            lines = []
            for _ in range(4):
                lines.append(stack.enter_context(pair.peer().connected()))
                send_message(lines[-1].sock, ReadObject("absent"))
                receive_message(lines[-1].sock, ReadReply)  # the server knows the caller now
            assert lines[0].sock.recv(1) == b"", "the oldest made room"
            assert copies(pair)


@pytest.mark.fault("A caller ceases to be a member while it reads")
def test_a_read_ends_where_its_caller_ceases_to_be_a_member(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    """The caller opened the connection as a member. The read ends between two requests and within one."""

    class Membership(Handler):
        left = 3

        def authorize(self, peer_dns_name: str, key: str) -> None:
            assert peer_dns_name == CLIENT
            self.left -= 1
            if self.left < 0:
                raise RefusedError(Refusal.NOT_MEMBER, "no member any more")

    membership = Membership()
    for pair in started(certificates, ScratchTier(), handler=membership):
        record = filled(pair.tier, 24 << 20)
        with pair.open(record.ref) as shard:
            membership.left = 3
            views = shard.read([range(0, 16), range(16, 96)])
            assert len(next(views)) == PIECE_BYTES
            with pytest.raises(RefusedError, match="no member any more"):
                next(views)
        for allowed in range(8):
            membership.left = allowed
            with pytest.raises(RefusedError, match="no member any more"):
                copy_shard(pair.peer(), record.ref, ScratchTier())
