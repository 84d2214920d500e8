"""Ranges of a peer's shard: one connection serves many, and each byte is verified by the chunk table."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.support.peer.bulk_pair import CLIENT, Pair, Wire, started
from tests.support.peer.hostile_peer import (
    CHUNK,
    CHUNKS,
    DATA,
    HEAD,
    SIZE,
    Answer,
    HostilePeer,
    filled,
    requested,
    sends,
    sends_trailer,
    trailer_of,
)
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.canonical import crc32c
from holdfast_core.format.keys import node_key
from holdfast_core.ids import MAX_INT, ByteRange
from holdfast_core.messages.schema import ReadObject, ReadReply, Refusal
from holdfast_core.net import TlsFiles
from holdfast_core.peer.protocol import receive_into, receive_message, send_message
from holdfast_core.peer.store import PeerStore, copy_shard
from holdfast_core.shards.file import FOOTER_MAGIC, Trailer, trailer_offset, unpack_trailer
from holdfast_core.store.download.stored import MAX_TRAILER_BYTES

FOOTER_BEGIN = struct.Struct("<QQI")
RUN_COUNT = 500
RUNS = [range(0, 3), range(5, 6), range(9, 30), range(31, 33), range(38, CHUNKS)]


def bytes_of(chunks: range) -> bytes:
    return DATA[chunks.start * CHUNK : chunks.stop * CHUNK]


def test_many_runs_on_few_connections(pair: Pair, wires: Callable[..., Wire]) -> None:
    record = filled(pair.tier)
    wire = wires()
    with pair.open(record.ref, wire.port) as shard:
        assert shard.trailer.record == record
        assert [bytes(view) for view in shard.read(RUNS)] == [bytes_of(run) for run in RUNS]
        assert [bytes(view) for view in shard.read(RUNS[:1])] == [bytes_of(RUNS[0])]
    assert wire.connections <= 2
    assert set(pair.handler.reads) == {(CLIENT, node_key(record.ref))}
    assert len(pair.handler.reads) > 1 + len(RUNS) + 1, "asked again before each piece"


def test_many_small_runs(pair: Pair) -> None:
    data = payload(4096 * (RUN_COUNT))
    header = shard_header(len(data), chunk_bytes=4096)
    record = pair.tier.write_shard(header, BytesSource(data))
    runs = (range(i, i + 1) for i in range(RUN_COUNT))
    with pair.open(record.ref) as shard:
        assert b"".join(bytes(view) for view in shard.read(runs)) == data


@pytest.mark.parametrize("broken", [False, True])
def test_ranges_come_outside_tls_where_both_sides_allow_it(
    pair: Pair, wires: Callable[..., Wire], broken: bool
) -> None:
    pair.handler.plain = True
    record = filled(pair.tier)
    wire = wires(cuts=[1 << 20] if broken else [])
    with pair.open(record.ref, wire.port, plain=True) as shard:
        assert b"".join(bytes(view) for view in shard.read([range(CHUNKS)])) == DATA
        assert [bytes(view) for view in shard.read(RUNS)] == [bytes_of(run) for run in RUNS]


def test_a_broken_connection_goes_on_with_the_run_that_was_cut(
    pair: Pair, wires: Callable[..., Wire]
) -> None:
    record = filled(pair.tier)
    wire = wires(cuts=[1 << 20, 1 << 20])
    with pair.open(record.ref, wire.port) as shard:
        assert [bytes(view) for view in shard.read(RUNS)] == [bytes_of(run) for run in RUNS]
    assert wire.connections >= 2


def test_a_peer_that_always_cuts_is_given_up(pair: Pair, wires: Callable[..., Wire]) -> None:
    record = filled(pair.tier)
    wire = wires(cuts=[300_000] * 100)
    with (
        pair.open(record.ref, wire.port) as shard,
        pytest.raises(UnavailableError, match="all 3 attempts failed"),
    ):
        list(shard.read([range(CHUNKS)]))


def test_a_reader_that_stops_in_the_middle_reads_again(pair: Pair) -> None:
    record = filled(pair.tier)
    with pair.open(record.ref) as shard:
        views = shard.read(RUNS)
        assert bytes(next(views)) == bytes_of(RUNS[0])
        views.close()
        assert [bytes(view) for view in shard.read(RUNS)] == [bytes_of(run) for run in RUNS]


def test_what_is_not_there(pair: Pair) -> None:
    record = filled(ScratchTier())
    with pytest.raises(NotFoundError):
        pair.open(record.ref)


def test_a_shard_that_goes_in_the_middle_is_read_to_its_end(pair: Pair) -> None:
    """The peer keeps the deleted file open for the connection. A new connection does not find it."""
    record = filled(pair.tier)
    with pair.open(record.ref) as shard:
        views = shard.read([range(i, i + 1) for i in range(CHUNKS)])
        assert bytes(next(views)) == bytes_of(range(1))
        pair.tier.delete_shard(record.ref)
        assert [bytes(view) for view in views] == [
            bytes_of(range(i, i + 1)) for i in range(1, CHUNKS)
        ]
    with pytest.raises(NotFoundError):
        pair.open(record.ref)


def test_a_connection_reads_one_shard_after_the_other(pair: Pair) -> None:
    """The file that is open for one request is not used for the next shard."""
    first, second = filled(pair.tier), filled(pair.tier, step=11)
    with pair.peer().connected() as line:
        for record in (first, second, first):
            end = ByteRange(trailer_offset(record.header), record.file_bytes)
            send_message(line.sock, ReadObject(node_key(record.ref), end))
            reply = receive_message(line.sock, ReadReply)
            packed = bytearray(reply.length_bytes)
            receive_into(line.sock, memoryview(packed))
            assert unpack_trailer(bytes(packed)).record == record


def test_a_refusal_leaves_the_connection_open(pair: Pair) -> None:
    here, absent = filled(pair.tier), filled(ScratchTier(), step=11)
    with pair.peer().connected() as line:
        for record, code in ((absent, Refusal.NOT_FOUND), (here, None)):
            send_message(line.sock, ReadObject(node_key(record.ref)))
            reply = receive_message(line.sock, ReadReply)
            assert (reply.refused and reply.refused.code) == code


def test_a_refused_caller_reads_nothing(pair: Pair) -> None:
    record = filled(pair.tier)
    pair.handler.error = RefusedError(Refusal.NOT_MEMBER, "who are you")
    with pytest.raises(RefusedError, match="who are you"):
        pair.open(record.ref)


def test_chunks_that_it_has_not_are_not_asked_for(pair: Pair) -> None:
    record = filled(pair.tier)
    with (
        pair.open(record.ref) as shard,
        pytest.raises(FormatError, match="expected chunks below"),
    ):
        list(shard.read([range(CHUNKS, CHUNKS + 1)]))


def test_bytes_that_do_not_match_the_chunk_table_are_refused(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    """The peer's table is right, but it sends other bytes."""
    tier = ScratchTier()
    record = filled(tier)
    tier.damage(record.ref, HEAD + 5 * CHUNK)
    for pair in started(certificates, tier):
        with pair.open(record.ref) as shard:
            views = shard.read([range(0, 2), range(2, 8)])
            assert bytes(next(views)) == bytes_of(range(0, 2))
            with pytest.raises(CorruptionError, match=r"chunks \[5\] do not match its chunk table"):
                next(views)


@pytest.fixture
def hostile(certificates: tuple[TlsFiles, TlsFiles]) -> Iterator[HostilePeer]:
    tier = ScratchTier()
    peer = HostilePeer(certificates, trailer_of(tier, filled(tier)))
    yield peer
    peer.close()


def bytes_of_another_place(sock: socket.socket, request: ReadObject) -> None:
    start, stop = (at - HEAD + CHUNK for at in (request.range.start, request.range.stop))
    sends((DATA + DATA)[start:stop])(sock, request)


def too_many_bytes(sock: socket.socket, request: ReadObject) -> None:
    sends(requested(request) + b"x")(sock, request)


def too_few_bytes(sock: socket.socket, request: ReadObject) -> None:
    sends(requested(request)[:-1])(sock, request)


def fewer_bytes_than_announced(sock: socket.socket, request: ReadObject) -> None:
    send_message(sock, ReadReply(len(requested(request))))
    sock.sendall(requested(request)[:-1])
    sock.shutdown(socket.SHUT_RDWR)


def outside_tls(sock: socket.socket, request: ReadObject) -> None:
    send_message(sock, ReadReply(len(requested(request)), plain=True))


def no_reply(sock: socket.socket, request: ReadObject) -> None:
    sock.sendall(b"\x00\x00\x00\x05hello")


def a_reply_without_end(sock: socket.socket, request: ReadObject) -> None:
    sock.sendall(b"\x7f\xff\xff\xff")


@pytest.mark.fault("A member sends a reply, or bytes, that it did not announce")
@pytest.mark.fault("A shard, a manifest or a layout is hostile")
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (bytes_of_another_place, CorruptionError),
        (too_many_bytes, FormatError),
        (too_few_bytes, FormatError),
        (fewer_bytes_than_announced, UnavailableError),
        (outside_tls, FormatError),
        (no_reply, FormatError),
        (a_reply_without_end, FormatError),
    ],
)
def test_a_hostile_peer_gives_no_byte(
    hostile: HostilePeer, answer: Answer, error: type[HoldfastError]
) -> None:
    hostile.spans = answer
    target = ScratchTier(capacity_bytes=64 << 20)
    with PeerStore(hostile.peer).open_shard(hostile.record.ref) as shard, pytest.raises(error):
        list(shard.read([range(CHUNKS)]))
    with pytest.raises(error):
        copy_shard(hostile.peer, hostile.record.ref, target)
    assert target.list_shards() == ()
    assert target.free_bytes() == 64 << 20


@pytest.mark.parametrize("length", [0, 1, 1 << 62])
def test_a_file_of_an_impossible_length_is_refused(hostile: HostilePeer, length: int) -> None:
    hostile.size = lambda sock, request: send_message(sock, ReadReply(length))
    with pytest.raises((CorruptionError, FormatError)):
        PeerStore(hostile.peer).open_shard(hostile.record.ref)


@pytest.mark.parametrize("length", [0, MAX_TRAILER_BYTES + 1, 1 << 62])
def test_a_trailer_of_an_impossible_length_is_refused(hostile: HostilePeer, length: int) -> None:
    """The file is long enough for it, and its footer is intact. Its memory is not taken."""
    footer = FOOTER_BEGIN.pack(length, SIZE, 0)
    footer += struct.pack("<I", crc32c(footer)) + FOOTER_MAGIC
    hostile.size = lambda sock, request: send_message(sock, ReadReply(MAX_INT))

    def answer(sock: socket.socket, request: ReadObject) -> None:
        count = request.range.stop - request.range.start
        sends(bytes(count - len(footer)) + footer)(sock, request)

    hostile.trailer = answer
    with pytest.raises(CorruptionError):
        PeerStore(hostile.peer).open_shard(hostile.record.ref)


def test_a_table_of_other_bytes_is_not_believed(hostile: HostilePeer) -> None:
    """The table is consistent and has the requested identity; only its digest differs."""
    forged = ScratchTier()
    header = shard_header(SIZE, chunk_bytes=CHUNK)
    record = forged.write_shard(header, BytesSource(payload(SIZE, seed=1)))
    hostile.trailer = sends_trailer(trailer_of(forged, record))
    with pytest.raises(CorruptionError, match="the file names the payload"):
        PeerStore(hostile.peer).open_shard(hostile.record.ref)


def test_a_table_with_other_digests_is_not_believed(hostile: HostilePeer) -> None:
    tier = ScratchTier()
    record = filled(tier)
    table = trailer_of(tier, record).table
    swapped = table.digests[32:64] + table.digests[:32] + table.digests[64:]
    hostile.trailer = sends_trailer(Trailer(record, replace(table, digests=swapped)))
    with pytest.raises(CorruptionError, match="does not match the digest of the payload"):
        PeerStore(hostile.peer).open_shard(hostile.record.ref)
