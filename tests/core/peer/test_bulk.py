"""Copies and fetches between real servers on loopback, with broken connections and bad bytes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

import pytest
from tests.core.peer.bulk_pair import (
    CLIENT,
    OPTIONS,
    ROUND,
    SERVER,
    SIZE,
    Cutter,
    Pair,
    filled,
    started,
)
from tests.support.servers.pki import Authority
from tests.support.shards.builders import BytesSource, payload, shard_file, shard_header
from tests.support.tiers.faulty import Fault, FaultKind, Faults, FaultyNodeTier
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    FormatError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.ids import ByteRange
from holdfast_core.messages.schema import Refusal
from holdfast_core.net.tls import TlsFiles, client_context
from holdfast_core.peer.client import send_copy
from holdfast_core.peer.protocol import (
    BulkFrame,
    Kind,
    Status,
    receive_frame,
    send_frame,
)
from holdfast_core.peer.server import BulkLimits


def test_a_copy_arrives_whole_and_is_asked_for_once(pair: Pair) -> None:
    source, record = filled()
    pair.send(source, record)
    assert pair.tier.list_shards() == (record,)
    with pair.tier.open_shard(record.ref) as reader:
        reader.verify()
    assert pair.handler.puts == [(CLIENT, ROUND, record.ref, record.file_bytes)] * 2
    pair.send(source, record)
    assert len(pair.handler.puts) == 3


@pytest.mark.parametrize("size", [0, 1, 1 << 20, SIZE])
def test_a_shard_is_fetched_whole(pair: Pair, size: int) -> None:
    record = pair.tier.write_shard(shard_header(size), BytesSource(payload(size)))
    target = MemoryTier()
    assert pair.fetch(target, record.ref) == record
    with target.open_shard(record.ref) as reader:
        reader.verify()
    assert set(pair.handler.gets) == {(CLIENT, record.ref)}


def test_a_range_of_the_payload(pair: Pair) -> None:
    data = payload(SIZE)
    record = pair.tier.write_shard(shard_header(SIZE), BytesSource(data))
    for start, stop in [(0, 0), (0, 10), (4194300, 4194310), (5, SIZE), (SIZE - 1, SIZE)]:
        assert pair.range(record.ref, ByteRange(start, stop)) == data[start:stop]
    with pytest.raises(RefusedError, match="payload of"):
        pair.range(record.ref, ByteRange(0, SIZE + 1))


@pytest.mark.parametrize("cuts", [[3 << 20], [5 << 20, 3 << 20]], ids=["once", "twice"])
def test_a_broken_copy_goes_on_where_it_stopped(pair: Pair, cuts: list[int]) -> None:
    source, record = filled()
    cutter = Cutter(pair.port, cuts)
    try:
        pair.send(source, record, cutter.port)
    finally:
        cutter.close()
    assert cutter.connections == len(cuts) + 1
    assert pair.tier.list_shards() == (record,)


def test_a_broken_fetch_goes_on_where_it_stopped(pair: Pair) -> None:
    record = pair.tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
    target = FaultyNodeTier(MemoryTier(), faults := Faults())
    cutter = Cutter(pair.port, [4 << 20])
    try:
        assert pair.fetch(target, record.ref, cutter.port) == record
    finally:
        cutter.close()
    assert cutter.connections == 2
    assert faults.calls("begin_copy") == 1


def test_attempts_are_bounded_and_nothing_stays_behind(pair: Pair) -> None:
    record = pair.tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
    target = MemoryTier(capacity_bytes=64 << 20)
    cutter = Cutter(pair.port, [2 << 20] * 10)
    try:
        with pytest.raises(UnavailableError, match="all 3 attempts failed"):
            pair.fetch(target, record.ref, cutter.port)
    finally:
        cutter.close()
    assert cutter.connections == 3
    assert target.free_bytes() == 64 << 20


def test_parked_copies_can_be_dropped(certificates: tuple[TlsFiles, TlsFiles]) -> None:
    tier = MemoryTier(capacity_bytes=64 << 20)
    for pair in started(certificates, tier):
        source, record = filled()
        cutter = Cutter(pair.port, [2 << 20] * 10)
        with pytest.raises(UnavailableError):
            pair.send(source, record, cutter.port)
        cutter.close()
        pair.server.close()
        assert tier.free_bytes() == 64 << 20


def test_a_stale_round_is_refused_with_the_newer_one(pair: Pair) -> None:
    source, record = filled(1000)
    pair.handler.put_error = StaleRoundError("older", own_round=7, own_version=2)
    with pytest.raises(StaleRoundError, match="older") as caught:
        pair.send(source, record)
    assert (caught.value.own_round, caught.value.own_version) == (7, 2)
    assert len(pair.handler.puts) == 1


def test_a_round_that_turns_stale_under_way_is_not_committed(pair: Pair) -> None:
    source, record = filled()
    pair.handler.commit_error = StaleRoundError("sealed meanwhile", own_round=4)
    with pytest.raises(StaleRoundError, match="sealed meanwhile"):
        pair.send(source, record)
    assert pair.tier.list_shards() == ()


@pytest.mark.parametrize("code", [Refusal.NOT_ASSIGNED, Refusal.NOT_MEMBER, Refusal.SEALED])
def test_refusals_carry_their_code(pair: Pair, code: Refusal) -> None:
    source, record = filled(1000)
    pair.handler.put_error = RefusedError(code, "not you")
    with pytest.raises(RefusedError, match="not you") as caught:
        pair.send(source, record)
    assert caught.value.code == code
    pair.handler.get_error = RefusedError(code, "not you")
    with pytest.raises(RefusedError) as caught:
        pair.fetch(MemoryTier(), record.ref)
    assert caught.value.code == code


def test_a_full_receiver_reports_it(certificates: tuple[TlsFiles, TlsFiles]) -> None:
    for pair in started(certificates, MemoryTier(capacity_bytes=1 << 20)):
        source, record = filled()
        with pytest.raises(CapacityError, match=r"needs \d+ bytes"):
            pair.send(source, record)


def test_an_absent_shard_is_not_found(pair: Pair) -> None:
    _, record = filled(1000)
    with pytest.raises(NotFoundError):
        pair.fetch(MemoryTier(), record.ref)


def test_a_sender_finds_damage_of_its_shard_before_it_sends_it(pair: Pair) -> None:
    source, record = filled()
    source.damage(record.ref, 5 << 20)
    with pytest.raises(CorruptionError, match="chunk 1"):
        pair.send(source, record)
    assert pair.tier.list_shards() == ()
    assert len(pair.handler.puts) == 1


def test_wrong_bytes_are_refused_by_the_receiver(pair: Pair) -> None:
    """The chunks are larger than a frame, so the sender does not compare them."""
    source, record = filled(chunk_bytes=8 << 20)
    source.damage(record.ref, 5 << 20)
    with pytest.raises(CorruptionError, match="PUT_COPY"):
        pair.send(source, record)
    assert pair.tier.list_shards() == ()
    assert len(pair.handler.puts) == 2


def test_wrong_bytes_are_refused_by_the_fetcher(pair: Pair) -> None:
    record = pair.tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
    pair.tier.damage(record.ref, 5 << 20)
    target = MemoryTier(capacity_bytes=64 << 20)
    with pytest.raises(CorruptionError, match="chunk 1"):
        pair.fetch(target, record.ref)
    assert target.list_shards() == ()
    assert target.free_bytes() == 64 << 20
    assert [ref for ref, _ in pair.tier.quarantined] == [record.ref]


def test_a_torn_shard_is_quarantined_by_its_server(pair: Pair) -> None:
    record = pair.tier.write_shard(shard_header(1000), BytesSource(payload(1000)))
    pair.tier.damage(record.ref, record.file_bytes - 1)
    with pytest.raises(CorruptionError):
        pair.fetch(MemoryTier(), record.ref)
    assert [ref for ref, _ in pair.tier.quarantined] == [record.ref]


def test_errors_of_the_own_disk_are_not_retried(pair: Pair) -> None:
    record = pair.tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
    full = CapacityError("volume is full")
    faults = Faults([Fault("copy.write", FaultKind.ERR, first=2, error=full)])
    cutter = Cutter(pair.port, [])
    with pytest.raises(CapacityError, match="volume is full"):
        pair.fetch(FaultyNodeTier(MemoryTier(), faults), record.ref, cutter.port)
    cutter.close()
    assert cutter.connections == 1


def test_another_server_under_this_address_is_not_spoken_to(
    pair: Pair, certificates: tuple[TlsFiles, TlsFiles]
) -> None:
    source, record = filled(1000)
    with source.open_shard(record.ref) as reader:
        with pytest.raises(AccessDeniedError, match="certificate of the peer was not accepted"):
            send_copy("127.0.0.1", pair.port, "gpt-9-r0.uid.holdfast", pair.client, ROUND, reader)
    assert pair.handler.puts == []


def test_a_caller_with_a_certificate_of_another_authority_gets_no_answer(
    pair: Pair, tmp_path: Path
) -> None:
    files = TlsFiles.in_directory(Authority().write_leaf(tmp_path, CLIENT))
    context = client_context(files)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    source, record = filled(1000)
    with source.open_shard(record.ref) as reader:
        with pytest.raises((AccessDeniedError, UnavailableError)):
            send_copy("127.0.0.1", pair.port, SERVER, context, ROUND, reader, options=OPTIONS)
    assert pair.handler.puts == []


def test_a_copy_to_a_closed_port_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source, record = filled(1000)
    context = ssl.create_default_context()
    with source.open_shard(record.ref) as reader:
        with pytest.raises(UnavailableError, match="refused"):
            send_copy("127.0.0.1", port, SERVER, context, ROUND, reader, options=OPTIONS)


def test_requests_beyond_the_limit_wait(certificates: tuple[TlsFiles, TlsFiles]) -> None:
    for pair in started(certificates, MemoryTier(), BulkLimits(requests=1)):
        records = [filled(200_000, rank=rank) for rank in range(4)]
        threads = [threading.Thread(target=pair.send, args=item) for item in records]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.header.rank for r in pair.tier.list_shards()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n" * 10, b"HFBK" + b"\xff" * 200, b"HFBK\x01\x04" + bytes(90)],
    ids=["http", "noise", "data first"],
)
def test_noise_ends_the_connection_only(pair: Pair, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pair.port), timeout=10) as plain:
        with pair.client.wrap_socket(plain, server_hostname=SERVER) as sock:
            sock.sendall(data)
            with contextlib.suppress(OSError):
                while sock.recv(4096):
                    pass
    source, record = filled(1000)
    pair.send(source, record)


def test_closing_the_server_ends_connections_that_wait(pair: Pair) -> None:
    """Such connections may wait for a minute, and close waits for their threads."""
    with socket.create_connection(("127.0.0.1", pair.port), timeout=10) as plain:
        with pair.client.wrap_socket(plain, server_hostname=SERVER) as sock:
            record = pair.tier.write_shard(shard_header(10), BytesSource(payload(10)))
            send_frame(sock, BulkFrame(Kind.PUT_COPY, record.ref, ROUND, length=8192))
            reply = receive_frame(sock)
            assert reply is not None and reply.status is Status.HAVE  # another request may follow
            (serving,) = [t for t in threading.enumerate() if t.name == "bulk"]
            pair.server.close()
            assert not serving.is_alive()


def test_frames_keep_their_fields() -> None:
    _, record = filled(10)
    left, right = socket.socketpair()
    with left, right:
        frame = BulkFrame(Kind.PUT_COPY, record.ref, ROUND, offset=5, length=1 << 50)
        send_frame(left, frame)
        assert receive_frame(right) == frame
        left.close()
        assert receive_frame(right) is None


def test_a_frame_of_another_version_is_refused() -> None:
    _, record = filled(10)
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, BulkFrame(Kind.GET_SHARD, record.ref, ROUND))
        data = bytearray(right.recv(4096))
        data[4] = 2
        left.sendall(data)
        with pytest.raises(FormatError, match="version 2"):
            receive_frame(right)


def test_a_whole_file_of_the_format_crosses(pair: Pair) -> None:
    file, record = shard_file(shard_header(123_456), payload(123_456))
    writer = pair.tier.begin_copy(record.ref, len(file))
    writer.write(file)
    writer.commit()
    target = MemoryTier()
    pair.fetch(target, record.ref)
    with target.open_shard(record.ref) as reader:
        assert socket_free_read(reader.fd, len(file)) == file


def socket_free_read(fd: int, size: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read(size)


def test_a_sender_that_comes_back_takes_over_from_its_dead_connection(pair: Pair) -> None:
    """The first connection becomes silent in the middle of the copy, without an error on this side."""
    source, record = filled()
    request = BulkFrame(Kind.PUT_COPY, record.ref, ROUND, length=record.file_bytes)
    with socket.create_connection(("127.0.0.1", pair.port)) as plain:
        silent = pair.client.wrap_socket(plain, server_hostname=SERVER)
        send_frame(silent, request)
        assert receive_frame(silent) is not None
        pair.send(source, record)
        silent.close()
    assert pair.tier.list_shards() == (record,)
