"""Ranges of a peer's shard: one connection serves many, and each byte is verified by the chunk table."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.core.peer.bulk_pair import (
    CLIENT,
    OPTIONS,
    ROUND,
    SERVER,
    Cutter,
    Handler,
    Pair,
)
from tests.core.peer.hostile_peer import (
    CHUNK,
    CHUNKS,
    DATA,
    SIZE,
    Answer,
    HostilePeer,
    data,
    filled,
    ok,
    table_of,
)
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.faulty import Fault, FaultKind, Faults, FaultyNodeTier
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.ids import ShardRef
from holdfast_core.messages.schema import Refusal
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_core.peer.protocol import BulkFrame, Kind, send_frame
from holdfast_core.peer.ranges import PeerShard
from holdfast_core.peer.remote import Peer, connect, expect_reply
from holdfast_core.peer.server import BulkServer
from holdfast_core.peer.table import receive_table
from holdfast_core.shards.file import Trailer

RUNS = [range(0, 3), range(5, 6), range(9, 30), range(31, 33), range(38, CHUNKS)]


def bytes_of(chunks: range) -> bytes:
    return DATA[chunks.start * CHUNK : chunks.stop * CHUNK]


def peer_of(pair: Pair, port: int | None = None) -> Peer:
    return Peer("127.0.0.1", port or pair.port, SERVER, pair.client, OPTIONS)


def open_at(pair: Pair, ref: ShardRef, port: int | None = None) -> PeerShard:
    return PeerShard.open(peer_of(pair, port), ROUND, ref)


def test_many_runs_on_one_connection(pair: Pair) -> None:
    record = filled(pair.tier)
    cutter = Cutter(pair.port, [])
    with open_at(pair, record.ref, cutter.port) as shard:
        assert shard.trailer.record == record
        assert [bytes(view) for view in shard.read(RUNS)] == [bytes_of(run) for run in RUNS]
        assert [bytes(view) for view in shard.read(RUNS[:1])] == [bytes_of(RUNS[0])]
    cutter.close()
    assert cutter.connections == 1
    assert set(pair.handler.gets) == {(CLIENT, record.ref)}
    assert len(pair.handler.gets) > 1 + len(RUNS) + 1, "asked again before each chunk"


def test_a_broken_connection_goes_on_with_the_run_that_was_cut(pair: Pair) -> None:
    record = filled(pair.tier)
    cutter = Cutter(pair.port, [1 << 20, 1 << 20])
    with open_at(pair, record.ref, cutter.port) as shard:
        assert [bytes(view) for view in shard.read(RUNS)] == [bytes_of(run) for run in RUNS]
    cutter.close()
    assert cutter.connections >= 2


def test_a_peer_that_always_cuts_is_given_up(pair: Pair) -> None:
    record = filled(pair.tier)
    cutter = Cutter(pair.port, [600_000] * 100)
    with (
        open_at(pair, record.ref, cutter.port) as shard,
        pytest.raises(UnavailableError, match="all 3 attempts failed"),
    ):
        list(shard.read([range(CHUNKS)]))
    cutter.close()


def test_a_reader_that_stops_in_the_middle_reads_again(pair: Pair) -> None:
    record = filled(pair.tier)
    with open_at(pair, record.ref) as shard:
        views = shard.read(RUNS)
        assert bytes(next(views)) == bytes_of(RUNS[0])
        views.close()
        assert [bytes(view) for view in shard.read(RUNS)] == [bytes_of(run) for run in RUNS]


def test_what_is_not_there(pair: Pair) -> None:
    record = filled(MemoryTier())
    with pytest.raises(NotFoundError):
        open_at(pair, record.ref)


def test_a_shard_that_goes_in_the_middle_is_read_to_its_end(pair: Pair) -> None:
    """The peer keeps the deleted file open for the connection. A new connection does not find it."""
    record = filled(pair.tier)
    with open_at(pair, record.ref) as shard:
        views = shard.read([range(i, i + 1) for i in range(CHUNKS)])
        assert bytes(next(views)) == bytes_of(range(1))
        pair.tier.delete_shard(record.ref)
        assert [bytes(view) for view in views] == [
            bytes_of(range(i, i + 1)) for i in range(1, CHUNKS)
        ]
        shard.close()
        with pytest.raises(NotFoundError):
            next(shard.read([range(1)]))


def test_a_connection_reads_one_shard_after_the_other(pair: Pair) -> None:
    """The file that is open for one request is not used for the next shard."""
    first, second = filled(pair.tier), filled(pair.tier, step=11)
    peer = peer_of(pair)
    with connect(peer) as line:
        for record in (first, second, first):
            request = BulkFrame(Kind.GET_TABLE, record.ref, ROUND)
            send_frame(line.sock, request)
            reply = expect_reply(line.sock, peer, request)
            assert receive_table(line.sock, request, reply.length).record == record


def test_a_refused_caller_reads_nothing(pair: Pair) -> None:
    record = filled(pair.tier)
    pair.handler.get_error = RefusedError(Refusal.NOT_MEMBER, "who are you")
    with pytest.raises(RefusedError, match="who are you"):
        open_at(pair, record.ref)


def test_chunks_that_it_has_not_are_not_asked_for(pair: Pair) -> None:
    record = filled(pair.tier)
    with (
        open_at(pair, record.ref) as shard,
        pytest.raises(FormatError, match="expected chunks below"),
    ):
        list(shard.read([range(CHUNKS, CHUNKS + 1)]))


def test_bytes_that_do_not_match_the_chunk_table_are_refused(
    certificates: tuple[TlsFiles, TlsFiles],
) -> None:
    """The frames are in order and their CRCs are right: the peer itself sends other bytes."""
    tier = MemoryTier()
    record = filled(tier)
    lying = FaultyNodeTier(tier, Faults([Fault("read", FaultKind.FLIP, first=5, times=1)]))
    server = BulkServer(Handler(), lying, server_context(certificates[0]))
    port = server.start("127.0.0.1", 0)
    peer = Peer("127.0.0.1", port, SERVER, client_context(certificates[1]), OPTIONS)
    try:
        with PeerShard.open(peer, ROUND, record.ref) as shard:
            views = shard.read([range(0, 2), range(2, 8)])
            assert bytes(next(views)) == bytes_of(range(0, 2))
            with pytest.raises(CorruptionError, match=r"chunks \[4\] do not match its chunk table"):
                next(views)
    finally:
        server.close()


@pytest.fixture
def hostile(certificates: tuple[TlsFiles, TlsFiles]) -> Iterator[HostilePeer]:
    tier = MemoryTier()
    record = filled(tier)
    peer = HostilePeer(certificates, record)
    with tier.open_shard(record.ref) as reader:
        trailer = Trailer(record, reader.table)
    peer.answers[Kind.GET_TABLE] = table_of(trailer)
    yield peer
    peer.close()


def bytes_of_another_place(sock: socket.socket, request: BulkFrame) -> None:
    ok(sock, request)
    start = request.offset + CHUNK
    data(sock, request, request.offset, DATA[start : start + request.length])


def too_many_bytes(sock: socket.socket, request: BulkFrame) -> None:
    ok(sock, request)
    data(sock, request, request.offset, DATA[request.offset :][: request.length + 1])


def another_offset(sock: socket.socket, request: BulkFrame) -> None:
    ok(sock, request)
    data(sock, request, request.offset + CHUNK, DATA[: request.length])


def half_of_them(sock: socket.socket, request: BulkFrame) -> None:
    ok(sock, request)
    data(sock, request, request.offset, DATA[request.offset :][: request.length // 2])
    send_frame(sock, BulkFrame(Kind.REPLY, request.ref, ROUND))


def of_another_shard(sock: socket.socket, request: BulkFrame) -> None:
    other = replace(request.ref, rank=3)
    send_frame(sock, BulkFrame(Kind.REPLY, other, ROUND))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (bytes_of_another_place, CorruptionError),
        (too_many_bytes, FormatError),
        (another_offset, FormatError),
        (half_of_them, FormatError),
        (of_another_shard, FormatError),
    ],
)
def test_a_hostile_peer_gives_no_byte(
    hostile: HostilePeer, answer: Answer, error: type[HoldfastError]
) -> None:
    hostile.answers[Kind.GET_RANGE] = answer
    with PeerShard.open(hostile.peer, ROUND, hostile.record.ref) as shard, pytest.raises(error):
        next(shard.read([range(0, 2)]))


def test_a_table_of_other_bytes_is_not_believed(hostile: HostilePeer) -> None:
    """The table is consistent and has the requested identity; only its digest differs."""
    forged = MemoryTier()
    header = shard_header(SIZE, chunk_bytes=CHUNK)
    record = forged.write_shard(header, BytesSource(payload(SIZE, seed=1)))
    with forged.open_shard(record.ref) as reader:
        hostile.answers[Kind.GET_TABLE] = table_of(Trailer(record, reader.table))
    with pytest.raises(CorruptionError, match="the file names the payload"):
        PeerShard.open(hostile.peer, ROUND, hostile.record.ref)


def test_a_table_with_other_digests_is_not_believed(hostile: HostilePeer) -> None:
    tier = MemoryTier()
    record = filled(tier)
    with tier.open_shard(record.ref) as reader:
        table = reader.table
    swapped = table.digests[32:64] + table.digests[:32] + table.digests[64:]
    lie = Trailer(record, replace(table, digests=swapped))
    hostile.answers[Kind.GET_TABLE] = table_of(lie)
    with pytest.raises(CorruptionError, match="does not match the digest of the payload"):
        PeerShard.open(hostile.peer, ROUND, hostile.record.ref)
