"""Copies of whole shards between real servers on loopback, with broken connections and bad bytes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.peer.bulk_pair import (
    CLIENT,
    SIZE,
    Pair,
    Wire,
    bytes_of,
    filled,
    started,
)
from tests.support.servers.pki import Authority
from tests.support.servers.ports import closed_port
from tests.support.shards.builders import payload, shard_file, shard_header
from tests.support.tiers.faulty import Fault, Faults, Faulty
from tests.support.tiers.scratch import ScratchTier

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
from holdfast_core.format.keys import node_key
from holdfast_core.ids import ByteRange, ShardRef
from holdfast_core.messages.schema import ReadObject, ReadReply, Refusal, Refused
from holdfast_core.net import TlsFiles, client_context
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.peer.protocol import PIECE_BYTES, receive_message, send_message
from holdfast_core.peer.server import BulkLimits
from holdfast_core.peer.store import RUN_BYTES, PeerStore, copy_shard
from holdfast_core.shards.file import head_bytes


@pytest.mark.parametrize("size", [0, 1, 1 << 20, SIZE])
def test_a_shard_is_copied_whole(pair: Pair, size: int) -> None:
    record = filled(pair.tier, size)
    target = ScratchTier()
    copied = pair.copy(target, record.ref)
    assert copied.record == record
    assert bytes_of(target, record) == payload(size)
    assert size < copied.received_bytes <= size + 8192
    assert set(pair.handler.reads) == {(CLIENT, node_key(record.ref))}
    assert pair.handler.throttled == []


@pytest.mark.parametrize("chunk_bytes", [4096, 12288, 3 << 20, 12 << 20])
def test_chunks_of_any_size(pair: Pair, chunk_bytes: int) -> None:
    record = filled(pair.tier, chunk_bytes=chunk_bytes)
    target = ScratchTier()
    pair.copy(target, record.ref)
    assert bytes_of(target, record) == payload(SIZE)


def test_the_server_limits_the_rate_of_background_copies(pair: Pair) -> None:
    record = filled(pair.tier)
    pair.copy(ScratchTier(), record.ref, background=True)
    assert SIZE <= sum(pair.handler.throttled) <= record.file_bytes + 8192
    assert max(pair.handler.throttled) <= PIECE_BYTES


def test_parts_of_the_payload(pair: Pair) -> None:
    data = payload(SIZE)
    record = filled(pair.tier)
    head = head_bytes(record.header)
    for span in (ByteRange(0, 10), ByteRange(4194300, 4194310), ByteRange(5, SIZE)):
        in_file = ByteRange(head + span.start, head + span.stop)
        assert pair.read(record.ref, in_file) == data[span.start : span.stop]
    end = record.file_bytes
    for span in (ByteRange(0, end + 1), ByteRange(end + 1, end + 2)):
        with pytest.raises(RefusedError, match="of an object of"):
            pair.read(record.ref, span)


def test_a_span_that_ends_before_it_begins_is_refused(pair: Pair) -> None:
    record = filled(pair.tier, 1000)
    with pair.peer().connected() as line:
        send_message(line.sock, ReadObject(node_key(record.ref), ByteRange(10, 5)))
        reply = receive_message(line.sock, ReadReply)
        assert reply.refused.code is Refusal.BAD_REQUEST


@pytest.mark.fault("A peer dies in the middle of a copy")
@pytest.mark.parametrize("cuts", [[5 << 20], [3 << 20] * 2, [*[3 << 20] * 2, 3000]], ids=len)
def test_a_broken_copy_goes_on_where_it_stopped(
    pair: Pair, wires: Callable[..., Wire], cuts: list[int]
) -> None:
    record = filled(pair.tier)
    target = Faulty(ScratchTier(), faults := Faults())
    wire = wires(cuts=cuts)
    assert pair.copy(target, record.ref, wire.port).record == record
    assert wire.connections == len(cuts) + 1
    assert faults.calls("begin_copy") == 1
    assert bytes_of(target, record) == payload(SIZE)


@pytest.mark.fault(
    "A connection breaks at any place of a copy (handshake, request, reply, trailer, payload)"
)
@pytest.mark.parametrize(
    "cut", [0, 1, 100, 1500, 2500, 3500, 5000, 10_000, 4 << 20, 9 << 20, SIZE + 9000]
)
def test_a_connection_that_breaks_at_any_place_delays_the_copy_only(
    pair: Pair, wires: Callable[..., Wire], cut: int
) -> None:
    """The cuts are within the handshake, the requests, the replies, the trailer and the payload."""
    record = filled(pair.tier)
    target = ScratchTier()
    wire = wires(cuts=[cut])
    pair.copy(target, record.ref, wire.port)
    assert bytes_of(target, record) == payload(SIZE)


@pytest.mark.fault("A peer dies in the middle of a copy")
def test_attempts_are_bounded_and_nothing_stays_behind(
    pair: Pair, wires: Callable[..., Wire]
) -> None:
    record = filled(pair.tier)
    target = ScratchTier(capacity_bytes=64 << 20)
    wire = wires(cuts=[500_000] * 10)
    with pytest.raises(UnavailableError, match="all 3 attempts failed"):
        pair.copy(target, record.ref, wire.port)
    assert 3 <= wire.connections <= 4, "the run that is read ahead may begin before the copy ends"
    assert target.free_bytes() == 64 << 20


@pytest.mark.fault("A message or a copy belongs to an older round")
@pytest.mark.fault("A pod of an older round sends old shards")
def test_a_round_that_turns_stale_under_way_is_not_committed(pair: Pair) -> None:
    record = filled(pair.tier)
    runs = 1 + SIZE // RUN_BYTES
    for allowed in range(runs + 1):
        target = ScratchTier(capacity_bytes=64 << 20)
        left = [allowed]

        def may_go_on(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StaleRoundError("sealed meanwhile", own_round=4)

        with pytest.raises(StaleRoundError, match="sealed meanwhile"):
            copy_shard(pair.peer(), record.ref, target, may_go_on)
        assert target.list_shards() == ()
        assert target.free_bytes() == 64 << 20


@pytest.mark.parametrize("code", [Refusal.NOT_ASSIGNED, Refusal.NOT_MEMBER, Refusal.SEALED])
def test_refusals_carry_their_code(pair: Pair, code: Refusal) -> None:
    record = filled(pair.tier, 1000)
    pair.handler.error = RefusedError(code, "not you")
    with pytest.raises(RefusedError, match="not you") as caught:
        pair.copy(ScratchTier(), record.ref)
    assert caught.value.code == code


@pytest.mark.fault("The receiver of a copy has no room")
def test_a_full_receiver_reports_it(pair: Pair) -> None:
    record = filled(pair.tier)
    with pytest.raises(CapacityError, match=r"needs \d+ bytes"):
        pair.copy(ScratchTier(capacity_bytes=1 << 20), record.ref)


def test_an_absent_shard_is_not_found(pair: Pair) -> None:
    record = filled(ScratchTier(), 1000)
    with pytest.raises(NotFoundError):
        pair.copy(ScratchTier(), record.ref)


@pytest.mark.fault("A peer sends wrong bytes")
@pytest.mark.parametrize("chunk_bytes", [256 << 10, 8 << 20])
def test_wrong_bytes_are_refused_by_the_receiver(pair: Pair, chunk_bytes: int) -> None:
    record = filled(pair.tier, chunk_bytes=chunk_bytes)
    pair.tier.damage(record.ref, 5 << 20)
    target = ScratchTier(capacity_bytes=64 << 20)
    with pytest.raises(CorruptionError, match="not match"):
        pair.copy(target, record.ref)
    assert target.list_shards() == ()
    assert target.free_bytes() == 64 << 20


@pytest.mark.parametrize("place", [10, -1], ids=["head", "trailer"])
def test_a_torn_shard_is_reported_as_corrupt(pair: Pair, place: int) -> None:
    record = filled(pair.tier, 1000)
    pair.tier.damage(record.ref, place % record.file_bytes)
    with pytest.raises(CorruptionError):
        pair.copy(ScratchTier(), record.ref)


@pytest.mark.fault("A shard file is cut while it is being served")
def test_a_file_that_was_cut_ends_the_connection(
    certificates: tuple[TlsFiles, TlsFiles], tmp_path: Path
) -> None:
    """The next request gets the reason. The bytes of no other answer are taken for the missing ones."""
    tier = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    tier.open()
    record = filled(tier)
    (path,) = tmp_path.rglob("*.shard")
    for pair in started(certificates, tier):  # type: ignore[arg-type]
        with pair.open(record.ref) as shard:
            os.truncate(path, 5 << 20)
            with pytest.raises(CorruptionError, match="bulk: reading"):
                list(shard.read([range(36)]))


def test_errors_of_the_own_disk_are_not_retried(pair: Pair, wires: Callable[..., Wire]) -> None:
    record = filled(pair.tier)
    full = CapacityError("volume is full")
    faults = Faults([Fault("write", full, first=2)])
    wire = wires()
    with pytest.raises(CapacityError, match="volume is full"):
        pair.copy(Faulty(ScratchTier(), faults), record.ref, wire.port)
    assert wire.connections == 1


def test_another_server_under_this_address_is_not_spoken_to(pair: Pair) -> None:
    record = filled(pair.tier, 1000)
    other = replace(pair.peer(), server_hostname="gpt-9-r0.uid.holdfast")
    with pytest.raises(AccessDeniedError, match="certificate of the peer was not accepted"):
        copy_shard(other, record.ref, ScratchTier())
    assert pair.handler.reads == []


def test_a_caller_with_a_certificate_of_another_authority_gets_no_answer(
    pair: Pair, tmp_path: Path
) -> None:
    files = TlsFiles.in_directory(Authority().write_leaf(tmp_path, CLIENT))
    context = client_context(files)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    record = filled(pair.tier, 1000)
    with pytest.raises((AccessDeniedError, UnavailableError)):
        copy_shard(replace(pair.peer(), ssl_context=context), record.ref, ScratchTier())
    assert pair.handler.reads == []


def test_a_closed_port_is_unavailable(pair: Pair) -> None:
    record = filled(ScratchTier(), 1000)
    with closed_port() as port, pytest.raises(UnavailableError, match="refused"):
        pair.copy(ScratchTier(), record.ref, port)


def test_requests_beyond_the_limit_wait(certificates: tuple[TlsFiles, TlsFiles]) -> None:
    for pair in started(certificates, ScratchTier(), BulkLimits(requests=1)):
        target = ScratchTier()
        records = [filled(pair.tier, 200_000, rank=rank) for rank in range(4)]
        threads = [threading.Thread(target=pair.copy, args=(target, r.ref)) for r in records]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [r.header.rank for r in target.list_shards()] == [0, 1, 2, 3]


def test_a_request_that_gets_no_turn_is_refused_as_busy(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    limits = BulkLimits(requests=1, io_seconds=0.2)
    started_reading, release = threading.Event(), threading.Event()

    class Slow(ScratchTier):
        def open_shard(self, ref: ShardRef) -> DiskShardReader:
            started_reading.set()
            assert release.wait(HANG_SECONDS)
            return super().open_shard(ref)

    for pair in started(certificates, Slow(), limits):
        record = filled(pair.tier, 1000)
        first = threading.Thread(target=pair.copy, args=(ScratchTier(), record.ref))
        first.start()
        assert started_reading.wait(HANG_SECONDS)
        with pytest.raises(UnavailableError, match=r"1 requests of .* are in progress"):
            pair.copy(ScratchTier(), record.ref, attempts=1)
        release.set()
        first.join()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        b"\x00\x00\x00\x00",
        b"\x7f\xff\xff\xff" + b"[" * 200,
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x02{}",
    ],
    ids=["http", "empty", "too long", "no JSON", "no request"],
)
def test_noise_ends_the_connection_only(pair: Pair, data: bytes) -> None:
    with pair.peer().connected() as line:
        line.sock.sendall(data)
        with contextlib.suppress(OSError):
            while line.sock.recv(4096):
                pass
    record = filled(pair.tier, 1000)
    pair.copy(ScratchTier(), record.ref)


def test_a_key_that_is_too_long_is_not_parsed() -> None:
    left, right = socket.socketpair()
    with left, right:
        send_message(left, ReadObject("a" * 513))
        with pytest.raises(FormatError, match="key: Expected `str` of length <= 512"):
            receive_message(right, ReadObject)


@pytest.mark.parametrize("key", ["", "../x", "uid", "a/b\0c", "/etc/passwd"])
def test_a_key_that_names_no_shard_is_not_found(pair: Pair, key: str) -> None:
    filled(pair.tier, 1000)
    with PeerStore(pair.peer()) as store:
        assert store.size(key) is None
        with pytest.raises(NotFoundError):
            store.read_into(key, 0, memoryview(bytearray(1)))


def test_closing_the_server_ends_connections_that_wait(pair: Pair) -> None:
    """Such connections may wait for a minute, and close waits for their threads."""
    record = filled(pair.tier, 10)
    earlier = set(threading.enumerate())  # those of an earlier test may still be ending
    with pair.open(record.ref):  # another request may follow
        (serving,) = [t for t in set(threading.enumerate()) - earlier if t.name == "bulk"]
        pair.server.close()
        assert not serving.is_alive()


def test_messages_keep_their_fields() -> None:
    record = filled(ScratchTier(), 10)
    refused = Refused(Refusal.BUSY, "later", record.ref.round)
    left, right = socket.socketpair()
    with left, right:
        for message in (
            ReadObject("a/b", ByteRange(5, 1 << 50), plain=True, background=True),
            ReadReply(1 << 50, plain=True),
            ReadReply(refused=refused),
        ):
            send_message(left, message)
            assert receive_message(right, type(message)) == message
        left.close()
        assert receive_message(right, ReadReply) is None


def test_a_message_of_an_unknown_shape_is_refused() -> None:
    left, right = socket.socketpair()
    with left, right:
        body = json.dumps({"length_bytes": -1}).encode()
        left.sendall(struct.pack("!I", len(body)) + body)
        with pytest.raises(FormatError, match="length_bytes"):
            receive_message(right, ReadReply)


def test_a_whole_file_of_the_format_crosses(pair: Pair) -> None:
    file, record = shard_file(shard_header(123_456), payload(123_456))
    writer = pair.tier.begin_copy(record.ref, len(file))
    writer.write(file)
    writer.commit()
    target = ScratchTier()
    pair.copy(target, record.ref)
    with target.open_shard(record.ref) as reader, open(reader.fd, "rb", closefd=False) as copy:
        copy.seek(0)
        assert copy.read() == file
