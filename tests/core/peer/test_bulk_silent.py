"""A peer that is connected and does nothing (F40, F45) is disconnected after its time and blocks no other."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.support.servers.pki import Authority
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import UnavailableError
from holdfast_core.ids import RestartRound, ShardRef
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_core.peer.client import fetch_shard
from holdfast_core.peer.protocol import BulkFrame, BulkOptions, Kind, send_frame
from holdfast_core.peer.server import BulkLimits, BulkServer
from holdfast_core.shards.record import ShardRecord

SERVER = "gpt-1-r0.uid.holdfast"
CLIENT = "gpt-0-r0.uid.holdfast"
ROUND = RestartRound(3)
SIZE = 24 << 20
"""More than the buffers of both sides can contain."""


class Everybody:
    def authorize_put(
        self, peer_dns_name: str, round: RestartRound, ref: ShardRef, file_bytes: int
    ) -> None:
        raise AssertionError("no test puts a shard here")

    def authorize_get(self, peer_dns_name: str, ref: ShardRef) -> None:
        return

    def allows_plain(self) -> bool:
        return False


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    root = tmp_path_factory.mktemp("certs")
    authority = Authority()

    def files(name: str, path: Path) -> TlsFiles:
        return TlsFiles.in_directory(authority.write_leaf(path, name))

    return (
        server_context(files(SERVER, root / "server")),
        client_context(files(CLIENT, root / "client")),
    )


Serving = Callable[[BulkLimits], AbstractContextManager[tuple[int, ShardRecord]]]


@pytest.fixture
def serving(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Serving:
    """Run a server that has one shard. Yield its port and the shard's record."""

    @contextmanager
    def start(limits: BulkLimits) -> Iterator[tuple[int, ShardRecord]]:
        tier = MemoryTier()
        record = tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        server = BulkServer(Everybody(), tier, contexts[0], limits=limits)
        port = server.start("127.0.0.1", 0)
        try:
            yield port, record
        finally:
            server.close()

    return start


def fetch(port: int, client: ssl.SSLContext, ref: ShardRef, options: BulkOptions) -> ShardRecord:
    tier = MemoryTier()
    return fetch_shard(
        "127.0.0.1", port, SERVER, client, ROUND, ref, tier.begin_copy, options=options
    )


@contextmanager
def connected(port: int, client: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(30)
        plain.connect(("127.0.0.1", port))
        with client.wrap_socket(plain, server_hostname=SERVER) as sock:
            yield sock


PATIENT = BulkOptions(connect_seconds=60, io_seconds=60, reply_seconds=60, attempts=3)


def test_f45_a_reader_that_does_not_read_is_disconnected(
    serving: Serving, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    with serving(BulkLimits(requests=1, io_seconds=2)) as (port, record):
        with connected(port, contexts[1]) as sock:
            send_frame(sock, BulkFrame(Kind.GET_SHARD, record.ref, ROUND))
            assert sock.recv(1)  # it is being served, and stops reading
            assert fetch(port, contexts[1], record.ref, PATIENT) == record


def test_f40_a_caller_that_vanished_is_disconnected(
    serving: Serving, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    with serving(BulkLimits(requests=1, idle_seconds=0.5)) as (port, record):
        with connected(port, contexts[1]) as sock:
            assert fetch(port, contexts[1], record.ref, PATIENT) == record
            assert sock.recv(1) == b""


def test_f40_a_caller_that_sends_nothing_is_disconnected(
    serving: Serving, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    with serving(BulkLimits(handshake_seconds=0.5)) as (port, record):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
            assert fetch(port, contexts[1], record.ref, PATIENT) == record
            assert silent.recv(1) == b""


def test_f40_a_server_that_vanished_is_given_up(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """The kernel accepts the connection, but no process answers."""
    tier = MemoryTier()
    record = tier.write_shard(shard_header(1000), BytesSource(payload(1000)))
    options = BulkOptions(connect_seconds=0.3, io_seconds=0.3, reply_seconds=0.3, attempts=2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(UnavailableError, match="all 2 attempts failed"):
            fetch(silent.getsockname()[1], contexts[1], record.ref, options)
