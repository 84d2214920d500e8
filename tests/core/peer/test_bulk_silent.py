"""A peer that is connected and does nothing is disconnected after its time and blocks no other."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.peer.bulk_pair import SERVER, Pair, filled, started
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import UnavailableError
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange
from holdfast_core.messages.schema import ReadObject
from holdfast_core.net import TlsFiles
from holdfast_core.peer.protocol import send_message
from holdfast_core.peer.server import BulkLimits
from holdfast_core.shards.file import ShardRecord

SIZE = 24 << 20
"""More than the buffers of both sides can contain."""


@contextmanager
def connected(pair: Pair) -> Iterator[socket.socket]:
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(HANG_SECONDS)
        plain.connect(("127.0.0.1", pair.port))
        with pair.client.wrap_socket(plain, server_hostname=SERVER) as sock:
            yield sock


def serving(
    certificates: tuple[TlsFiles, TlsFiles], limits: BulkLimits
) -> Iterator[tuple[Pair, ShardRecord]]:
    """Run a server that has one shard."""
    for pair in started(certificates, ScratchTier(), limits):
        yield pair, filled(pair.tier, SIZE)


@pytest.mark.fault("A peer does not read what it is sent")
@pytest.mark.parametrize("plain", [False, True], ids=["TLS", "plain"])
def test_a_reader_that_does_not_read_is_disconnected(
    certificates: tuple[TlsFiles, TlsFiles], plain: bool
) -> None:
    for pair, record in serving(certificates, BulkLimits(requests=1, io_seconds=2)):
        pair.handler.plain = plain
        with connected(pair) as sock:
            send_message(sock, ReadObject(node_key(record.ref), ByteRange(0, SIZE), plain=plain))
            assert sock.recv(1)  # it is being served, and stops reading
            assert pair.copy(ScratchTier(), record.ref).record == record


@pytest.mark.fault("One end of a connection vanishes without closing it")
def test_a_caller_that_vanished_is_disconnected(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    for pair, record in serving(certificates, BulkLimits(requests=1, idle_seconds=3)):
        with connected(pair) as sock:
            assert pair.copy(ScratchTier(), record.ref).record == record
            assert sock.recv(1) == b""


def test_a_caller_that_sends_nothing_is_disconnected(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    for pair, record in serving(certificates, BulkLimits(handshake_seconds=3)):
        with socket.create_connection(("127.0.0.1", pair.port), timeout=HANG_SECONDS) as silent:
            assert pair.copy(ScratchTier(), record.ref).record == record
            assert silent.recv(1) == b""


@pytest.mark.fault("One end of a connection vanishes without closing it")
def test_a_server_that_vanished_is_given_up(pair: Pair) -> None:
    """The kernel accepts the connection, but no process answers."""
    record = filled(ScratchTier(), 1000)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UnavailableError, match="all 2 attempts failed"):
            pair.copy(
                ScratchTier(), record.ref, port, connect_seconds=0.3, io_seconds=0.3, attempts=2
            )
