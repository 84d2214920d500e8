"""`peer.encryption: None`: payloads outside TLS, and what an attacker on the network can do to them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.servers.pki import Authority
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.faulty import Faults, FaultyNodeTier
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import (
    AccessDeniedError,
    CorruptionError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.format.digest import crc32c
from holdfast_core.ids import RestartRound, ShardRef
from holdfast_core.messages.schema import Refusal
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_core.peer.client import fetch_shard, send_copy
from holdfast_core.peer.connection import Line
from holdfast_core.peer.protocol import BulkFrame, BulkOptions, Kind, send_frame
from holdfast_core.peer.server import BulkServer
from holdfast_core.shards.record import ShardRecord

SERVER = "gpt-1-r0.uid.holdfast"
CLIENT = "gpt-0-r0.uid.holdfast"
ROUND = RestartRound(3)
SIZE = 9 << 20
MIB = 1 << 20
PLAIN = BulkOptions(connect_seconds=60, io_seconds=60, reply_seconds=60, attempts=2, plain=True)
CRC_OFFSET, FRAME_BYTES = 88, 96
"""Offset of the CRC in a frame's header, and size of the header: see docs/format.md 8."""
DATA = b"HFBK\x01\x04"
"""The first bytes of a DATA frame. There are six, because four also occur by chance in megabytes of
ciphertext."""


@dataclass
class Handler:
    plain: bool = True
    put_error: Exception | None = None
    commit_error: Exception | None = None
    puts: int = 0
    gets: int = 0

    def authorize_put(
        self, peer_dns_name: str, round: RestartRound, ref: ShardRef, file_bytes: int
    ) -> None:
        self.puts += 1
        if self.put_error is not None:
            raise self.put_error
        if self.commit_error is not None and self.puts > 1:
            raise self.commit_error

    def authorize_get(self, peer_dns_name: str, ref: ShardRef) -> None:
        self.gets += 1

    def allows_plain(self) -> bool:
        return self.plain


Meddle = Callable[[bytearray], bytearray]


@dataclass
class Wire:
    """An attacker between caller and server: a relay that reads every byte and can change those of the
    first connection. `meddles_upwards`: it changes the bytes that the caller sends."""

    target: int
    meddle: Meddle | None = None
    meddles_upwards: bool = True
    cut_after: int | None = None
    """Bytes of the first connection after which it breaks."""
    seen: list[bytearray] = field(default_factory=list)
    """All bytes of each connection, in both directions."""

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
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
            far = socket.create_connection(("127.0.0.1", self.target))
            number = len(self.seen)
            self.seen.append(bytearray())
            for source, sink, upwards in ((near, far, True), (far, near, False)):
                threading.Thread(
                    target=self._pump, args=(source, sink, upwards, number), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool, number: int) -> None:
        held = bytearray()
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen[number] += data
                cut = number == 0 and self.cut_after is not None
                if cut and len(self.seen[0]) > (self.cut_after or 0):
                    break
                if number == 0 and self.meddle is not None and upwards is self.meddles_upwards:
                    held += data
                    passed = self.meddle(held)
                    sink.sendall(passed)
                else:
                    sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def change_a_chunk(*, crc_too: bool) -> Meddle:
    """Return a function that flips a bit of the first DATA frame in the clear. `crc_too`: it also corrects
    the CRC, as an attacker would."""
    done = False

    def meddle(held: bytearray) -> bytearray:
        nonlocal done
        at = held.find(DATA)
        if done or at < 0:
            passed = bytearray(held)
            held.clear()
            return passed
        if len(held) < at + FRAME_BYTES:
            return bytearray()
        (length,) = struct.unpack_from("!Q", held, at + 48)
        (meta_bytes,) = struct.unpack_from("!I", held, at + CRC_OFFSET + 4)
        start = at + FRAME_BYTES + meta_bytes
        if len(held) < start + length:
            return bytearray()
        held[start + 1000] ^= 1
        if crc_too:
            struct.pack_into("!I", held, at + CRC_OFFSET, crc32c(held[start : start + length]))
        done = True
        passed = bytearray(held)
        held.clear()
        return passed

    return meddle


@dataclass
class Pair:
    handler: Handler
    tier: MemoryTier
    port: int
    client: ssl.SSLContext

    def send(
        self, tier: MemoryTier, record: ShardRecord, port: int, options: BulkOptions = PLAIN
    ) -> None:
        with tier.open_shard(record.ref) as reader:
            send_copy("127.0.0.1", port, SERVER, self.client, ROUND, reader, options=options)

    def fetch(
        self,
        tier: MemoryTier | FaultyNodeTier,
        ref: ShardRef,
        port: int,
        options: BulkOptions = PLAIN,
    ) -> ShardRecord:
        return fetch_shard(
            "127.0.0.1", port, SERVER, self.client, ROUND, ref, tier.begin_copy, options=options
        )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, TlsFiles]:
    root = tmp_path_factory.mktemp("certs")
    authority = Authority()
    return (
        TlsFiles.in_directory(authority.write_leaf(root / "server", SERVER)),
        TlsFiles.in_directory(authority.write_leaf(root / "client", CLIENT)),
    )


@pytest.fixture
def pair(certificates: tuple[TlsFiles, TlsFiles]) -> Iterator[Pair]:
    handler, tier = Handler(), MemoryTier()
    server = BulkServer(handler, tier, server_context(certificates[0]))
    port = server.start("127.0.0.1", 0)
    try:
        yield Pair(handler, tier, port, client_context(certificates[1]))
    finally:
        server.close()


@pytest.fixture
def wires(pair: Pair) -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []

    def wire(**fields: object) -> Wire:
        made.append(Wire(pair.port, **fields))  # type: ignore[arg-type]
        return made[-1]

    yield wire
    for each in made:
        each.close()


def filled(tier: MemoryTier, size: int = SIZE, **fields: int) -> ShardRecord:
    header = shard_header(size, **fields)  # type: ignore[arg-type]
    return tier.write_shard(header, BytesSource(payload(size)))


@pytest.mark.parametrize("size", [0, 1, MIB, SIZE])
def test_payloads_travel_in_the_clear_and_nothing_else_does(
    pair: Pair, wires: Callable[..., Wire], size: int
) -> None:
    source, target = MemoryTier(), MemoryTier()
    record = filled(source, size)
    up, down = wires(), wires()
    pair.send(source, record, up.port)
    assert pair.tier.list_shards() == (record,)
    assert pair.fetch(target, record.ref, down.port) == record
    data = payload(size)
    for wire in (up, down):
        (seen,) = wire.seen
        assert data[:1000] in seen and data[-1000:] in seen
        # The head names the layout and the request names the digest. Neither is sent in the clear.
        assert b"HFSHARD1" not in seen
        assert b"HFBK\x01\x01" not in seen and b"HFBK\x01\x02" not in seen
        assert b"HFBK\x01\x05" not in seen
    for tier in (pair.tier, target):
        with tier.open_shard(record.ref) as reader:
            reader.verify()


@pytest.mark.parametrize(
    ("server_allows", "caller_asks"), [(False, True), (True, False), (False, False)]
)
def test_one_side_alone_does_not_leave_tls(
    pair: Pair, wires: Callable[..., Wire], server_allows: bool, caller_asks: bool
) -> None:
    pair.handler.plain = server_allows
    options = BulkOptions(attempts=1, plain=caller_asks)
    source = MemoryTier()
    record = filled(source)
    up, down = wires(), wires()
    pair.send(source, record, up.port, options)
    pair.fetch(MemoryTier(), record.ref, down.port, options)
    for wire in (up, down):
        (seen,) = wire.seen
        assert len(seen) > SIZE
        assert all(payload(SIZE)[at : at + 16] not in seen for at in range(0, SIZE, MIB))
        assert DATA not in seen


@pytest.mark.parametrize("crc_too", [False, True], ids=["damage", "attack"])
def test_a_changed_copy_is_not_kept_and_goes_again_inside_tls(
    pair: Pair, wires: Callable[..., Wire], crc_too: bool
) -> None:
    source = MemoryTier()
    record = filled(source)
    wire = wires(meddle=change_a_chunk(crc_too=crc_too))
    pair.send(source, record, wire.port)
    assert pair.tier.list_shards() == (record,)
    with pair.tier.open_shard(record.ref) as reader:
        reader.verify()
    assert len(wire.seen) == 2
    assert DATA in wire.seen[0] and DATA not in wire.seen[1]


@pytest.mark.parametrize("crc_too", [False, True], ids=["damage", "attack"])
def test_a_changed_shard_is_not_kept_and_fetched_again_inside_tls(
    pair: Pair, wires: Callable[..., Wire], crc_too: bool
) -> None:
    record = filled(pair.tier)
    target = MemoryTier(capacity_bytes=64 << 20)
    wire = wires(meddle=change_a_chunk(crc_too=crc_too), meddles_upwards=False)
    assert pair.fetch(target, record.ref, wire.port) == record
    with target.open_shard(record.ref) as reader:
        reader.verify()
    assert len(wire.seen) == 2
    assert DATA not in wire.seen[1]
    assert pair.tier.quarantined == []
    assert target.free_bytes() == (64 << 20) - record.file_bytes


@pytest.mark.parametrize("put", [True, False], ids=["put", "get"])
def test_an_attack_on_plain_copies_is_no_fault_of_the_peer(
    pair: Pair, wires: Callable[..., Wire], put: bool
) -> None:
    """A CorruptionError would make the sender quarantine its shard."""
    source = MemoryTier()
    record = filled(source if put else pair.tier)
    wire = wires(meddle=change_a_chunk(crc_too=True), meddles_upwards=put)
    options = BulkOptions(attempts=1, plain=True)
    target = MemoryTier(capacity_bytes=64 << 20)
    with pytest.raises(UnavailableError, match="outside TLS"):
        if put:
            pair.send(source, record, wire.port, options)
        else:
            pair.fetch(target, record.ref, wire.port, options)
    kept = pair.tier if put else target
    assert kept.list_shards() == ()
    assert target.free_bytes() == 64 << 20


def test_an_acknowledgement_in_the_clear_is_not_believed(
    pair: Pair, wires: Callable[..., Wire]
) -> None:
    source = MemoryTier()
    record = filled(source)
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, BulkFrame(Kind.REPLY, record.ref, ROUND))
        forged = right.recv(4096)
    plain_seen = False

    def meddle(held: bytearray) -> bytearray:
        """Send the forged answer of the receiver as soon as plain bytes are on the wire."""
        nonlocal plain_seen
        passed = bytearray(held)
        held.clear()
        if not plain_seen and DATA in wire.seen[0]:
            plain_seen = True
            return bytearray(forged)
        return passed

    wire = wires(meddle=meddle, meddles_upwards=False)
    pair.send(source, record, wire.port)
    assert plain_seen
    assert len(wire.seen) == 2
    assert pair.tier.list_shards() == (record,)


def test_a_broken_copy_goes_on_where_it_stopped(pair: Pair, wires: Callable[..., Wire]) -> None:
    source = MemoryTier()
    record = filled(source)
    wire = wires(cut_after=6 << 20)
    pair.send(source, record, wire.port)
    assert pair.tier.list_shards() == (record,)
    assert len(wire.seen) == 2
    assert len(wire.seen[1]) < SIZE - (3 << 20)
    assert DATA not in wire.seen[1]


def test_a_broken_fetch_goes_on_where_it_stopped(pair: Pair, wires: Callable[..., Wire]) -> None:
    record = filled(pair.tier)
    faults = Faults()
    target = FaultyNodeTier(MemoryTier(), faults)
    wire = wires(cut_after=6 << 20)
    assert pair.fetch(target, record.ref, wire.port) == record
    assert faults.calls("begin_copy") == 1
    assert len(wire.seen[1]) < SIZE - (3 << 20)
    assert DATA not in wire.seen[1]


def test_a_bad_shard_of_the_sender_is_reported_inside_tls(pair: Pair) -> None:
    source = MemoryTier()
    record = filled(source)
    source.damage(record.ref, 5 << 20)
    with pytest.raises(CorruptionError, match="chunk 1"):
        pair.send(source, record, pair.port)
    assert pair.tier.list_shards() == ()


def test_refusals_are_received(pair: Pair) -> None:
    source = MemoryTier()
    record = filled(source)
    pair.handler.commit_error = StaleRoundError("sealed meanwhile", own_round=4)
    with pytest.raises(StaleRoundError, match="sealed meanwhile"):
        pair.send(source, record, pair.port)
    assert pair.handler.puts == 2
    pair.handler.put_error = RefusedError(Refusal.NOT_ASSIGNED, "not you")
    with pytest.raises(RefusedError, match="not you"):
        pair.send(source, record, pair.port)
    assert pair.handler.puts == 3
    assert pair.tier.list_shards() == ()


def test_after_the_return_to_tls_the_server_checks_that_the_caller_is_the_same(
    tmp_path: Path,
) -> None:
    authority = Authority()
    server = server_context(
        TlsFiles.in_directory(authority.write_leaf(tmp_path / "server", SERVER))
    )
    callers = [
        client_context(TlsFiles.in_directory(authority.write_leaf(tmp_path / name, name)))
        for name in (CLIENT, "gpt-2-r0.uid.holdfast")
    ]
    near, far = socket.socketpair()
    near.settimeout(10)
    far.settimeout(10)

    def call() -> None:
        with contextlib.suppress(OSError):
            first = callers[0].wrap_socket(near, server_hostname=SERVER)
            first.unwrap()
            callers[1].wrap_socket(first, server_hostname=SERVER)

    thread = threading.Thread(target=call)
    thread.start()
    with Line(far, lambda sock: server.wrap_socket(sock, server_side=True)) as line:
        assert line.secure() == CLIENT
        assert not line.outside
        line.leave()
        assert line.outside
        with pytest.raises(AccessDeniedError, match=r"changed from gpt-0-r0\S* to gpt-2-r0"):
            line.secure()
    thread.join()
    near.close()
