"""A real bulk server on loopback, its callers, and a relay between them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import HoldfastError
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange, RestartRound, ShardRef
from holdfast_core.net import TlsFiles, client_context, server_context
from holdfast_core.peer.protocol import BulkOptions, Peer
from holdfast_core.peer.server import BulkLimits, BulkServer, shards_of
from holdfast_core.peer.store import PeerStore, copy_shard
from holdfast_core.shards.file import ShardRecord
from holdfast_core.store.download.shard import Copied, StoredShardReader
from holdfast_core.tiers.base import NodeTier

SERVER = "gpt-1-r0.uid.holdfast"
CLIENT = "gpt-0-r0.uid.holdfast"
ROUND = RestartRound(3)
SIZE = 9 << 20
Meddle = Callable[[bytearray], bytearray]
OPTIONS = BulkOptions(connect_seconds=HANG_SECONDS, io_seconds=HANG_SECONDS, attempts=3)


@dataclass
class Handler:
    """A handler that allows everything except what a test forbids."""

    error: HoldfastError | None = None
    reads: list[tuple[str, str]] = field(default_factory=list)
    plain: bool = False
    throttled: list[int] = field(default_factory=list)

    def authorize(self, peer_dns_name: str, key: str) -> None:
        self.reads.append((peer_dns_name, key))
        if self.error is not None:
            raise self.error

    def allows_plain(self) -> bool:
        return self.plain

    def throttle(self, byte_count: int) -> None:
        self.throttled.append(byte_count)


@dataclass
class Pair:
    """A server with its tier, and the parameters of a caller."""

    handler: Handler
    tier: ScratchTier
    server: BulkServer
    client: ssl.SSLContext
    port: int

    def peer(self, port: int | None = None, **options: object) -> Peer:
        """Return the server as a caller addresses it, by way of a relay at `port`."""
        chosen = replace(OPTIONS, **options)  # type: ignore[arg-type]
        return Peer("127.0.0.1", port or self.port, SERVER, self.client, chosen)

    def copy(
        self, tier: NodeTier, ref: ShardRef, port: int | None = None, **options: object
    ) -> Copied:
        return copy_shard(self.peer(port, **options), ref, tier)

    def open(self, ref: ShardRef, port: int | None = None, **options: object) -> StoredShardReader:
        return PeerStore(self.peer(port, **options)).open_shard(ref)

    def read(self, ref: ShardRef, wanted: ByteRange) -> bytes:
        """Return any bytes of the shard file, unverified."""
        found = bytearray(wanted.length_bytes)
        with PeerStore(self.peer()) as store:
            store.read_into(node_key(ref), wanted.start, memoryview(found))
        return bytes(found)


def started(
    certificates: tuple[TlsFiles, TlsFiles],
    tier: ScratchTier,
    limits: BulkLimits | None = None,
    handler: Handler | None = None,
) -> Iterator[Pair]:
    handler = handler or Handler()
    server = BulkServer(handler, shards_of(tier), server_context(certificates[0]), limits=limits)
    port = server.start("127.0.0.1", 0)
    try:
        yield Pair(handler, tier, server, client_context(certificates[1]), port)
    finally:
        server.close()


def write(tier: NodeTier, data: bytes, **fields: int) -> ShardRecord:
    header = shard_header(len(data), **fields)  # type: ignore[arg-type]
    return tier.write_shard(header, BytesSource(data))


def filled(tier: NodeTier, size: int = SIZE, **fields: int) -> ShardRecord:
    return write(tier, payload(size), **fields)


def bytes_of(tier: NodeTier, record: ShardRecord) -> bytes:
    """Return the payload of a shard after the whole file was verified."""
    with tier.open_shard(record.ref) as reader:
        reader.verify()
        return b"".join(bytes(piece) for piece in reader.read_payload())


class Wire:
    """A relay between a caller and the server. It records every byte and can break connections.

    Args:
        port: Port of the server.
        cuts: Bytes of both sides after which the first connections break.
        meddle: Returns what the caller gets instead of the bytes that it empties, on the first connection.
    """

    def __init__(self, port: int, cuts: Sequence[int] = (), meddle: Meddle | None = None) -> None:
        self._target = port
        self._cuts = list(cuts)
        self._meddle = meddle
        self.seen: list[bytearray] = []
        """All bytes of each connection, in both directions."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self.seen)

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
            far = socket.create_connection(("127.0.0.1", self._target))
            seen, budget = bytearray(), [self._cuts.pop(0) if self._cuts else 1 << 60]
            meddle = None if self.seen else self._meddle
            self.seen.append(seen)
            for way in ((near, far, None), (far, near, meddle)):
                threading.Thread(target=self._pump, args=(*way, seen, budget), daemon=True).start()

    @staticmethod
    def _pump(
        source: socket.socket,
        sink: socket.socket,
        meddle: Meddle | None,
        seen: bytearray,
        budget: list[int],
    ) -> None:
        held = bytearray()
        with contextlib.suppress(OSError):
            while budget[0] > 0 and (data := source.recv(min(65536, budget[0]))):
                budget[0] -= len(data)
                seen += data
                if meddle is not None:
                    held += data
                    data = bytes(meddle(held))
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
