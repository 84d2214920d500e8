"""A real bulk server on loopback, its callers, and a relay that cuts their connections."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import ByteRange, RestartRound, ShardRef
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_core.peer.client import fetch_shard, send_copy
from holdfast_core.peer.protocol import (
    BulkFrame,
    BulkOptions,
    Kind,
    receive_data,
    send_frame,
)
from holdfast_core.peer.remote import Peer, connect, expect_data, expect_reply
from holdfast_core.peer.server import BulkLimits, BulkServer
from holdfast_core.shards.record import ShardRecord

SERVER = "gpt-1-r0.uid.holdfast"
CLIENT = "gpt-0-r0.uid.holdfast"
ROUND = RestartRound(3)
SIZE = 9 << 20
OPTIONS = BulkOptions(connect_seconds=60, io_seconds=60, reply_seconds=60, attempts=3)


@dataclass
class Handler:
    """A handler that allows everything except what a test forbids."""

    put_error: HoldfastError | None = None
    commit_error: HoldfastError | None = None
    get_error: HoldfastError | None = None
    puts: list[tuple[str, RestartRound, ShardRef, int]] = field(default_factory=list)
    gets: list[tuple[str, ShardRef]] = field(default_factory=list)
    plain: bool = False

    def authorize_put(
        self, peer_dns_name: str, round: RestartRound, ref: ShardRef, file_bytes: int
    ) -> None:
        self.puts.append((peer_dns_name, round, ref, file_bytes))
        if self.put_error is not None:
            raise self.put_error
        if self.commit_error is not None and len(self.puts) > 1:
            raise self.commit_error

    def authorize_get(self, peer_dns_name: str, ref: ShardRef) -> None:
        self.gets.append((peer_dns_name, ref))
        if self.get_error is not None:
            raise self.get_error

    def allows_plain(self) -> bool:
        return self.plain


@dataclass
class Pair:
    """A server with its tier, and the parameters of a caller."""

    handler: Handler
    tier: MemoryTier
    server: BulkServer
    client: ssl.SSLContext
    port: int

    def send(self, tier: MemoryTier, record: ShardRecord, port: int | None = None) -> int:
        with tier.open_shard(record.ref) as reader:
            return send_copy(
                "127.0.0.1", port or self.port, SERVER, self.client, ROUND, reader, options=OPTIONS
            )

    def fetch(self, tier: object, ref: ShardRef, port: int | None = None) -> ShardRecord:
        return fetch_shard(
            "127.0.0.1",
            port or self.port,
            SERVER,
            self.client,
            ROUND,
            ref,
            tier.begin_copy,  # type: ignore[attr-defined]
            options=OPTIONS,
        )

    def range(self, ref: ShardRef, span: ByteRange) -> bytes:
        """Return the bytes that a GET_RANGE of any part of the payload delivers, unverified."""
        peer = Peer("127.0.0.1", self.port, SERVER, self.client, OPTIONS)
        request = BulkFrame(Kind.GET_RANGE, ref, ROUND, offset=span.start, length=span.length_bytes)
        found = bytearray()
        with connect(peer) as line:
            send_frame(line.sock, request)
            expect_reply(line.sock, peer, request)
            while len(found) < span.length_bytes:
                frame = expect_data(line.sock, peer, request)
                room = memoryview(bytearray(frame.length))
                found += receive_data(line.sock, frame, ref, span.start + len(found), room)
        return bytes(found)


def started(
    certificates: tuple[TlsFiles, TlsFiles], tier: MemoryTier, limits: BulkLimits | None = None
) -> Iterator[Pair]:
    handler = Handler()
    server = BulkServer(handler, tier, server_context(certificates[0]), limits=limits)
    port = server.start("127.0.0.1", 0)
    try:
        yield Pair(handler, tier, server, client_context(certificates[1]), port)
    finally:
        server.close()


def filled(size: int = SIZE, **fields: int) -> tuple[MemoryTier, ShardRecord]:
    tier = MemoryTier()
    header = shard_header(size, **fields)  # type: ignore[arg-type]
    return tier, tier.write_shard(header, BytesSource(payload(size)))


class Cutter:
    """A TCP relay that cuts the first connections after so many bytes from either side."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._target = port
        self._cuts = list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._target))
            budget = [self._cuts.pop(0) if self._cuts else 1 << 60]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(
                    target=self._pump, args=(source, sink, budget), daemon=True
                ).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, budget: list[int]) -> None:
        with contextlib.suppress(OSError):
            while budget[0] > 0 and (data := source.recv(65536)):
                budget[0] -= len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
