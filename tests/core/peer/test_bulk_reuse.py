"""Copies to a receiver that has some of the chunks: only the rest is sent, and the file is complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.peer.bulk_pair import OPTIONS, ROUND, SERVER, Cutter, Pair, started
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.shards.shard_files import flip_bit
from tests.support.tiers.faulty import Fault, FaultKind, Faults, FaultyNodeTier
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.ids import ShardRef
from holdfast_core.net.tls import TlsFiles
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.peer.client import send_copy
from holdfast_core.peer.protocol import BulkOptions
from holdfast_core.peer.ranges import PeerShard
from holdfast_core.peer.remote import Peer
from holdfast_core.shards.chunk_table import ChunkTable
from holdfast_core.shards.record import ShardRecord

MIB = 1 << 20
SIZE = 9 * MIB + 5
CHUNK = 256 << 10
OVERHEAD = 3 * 4096
"""Bytes of the head and the trailer of such a shard."""


def changed(data: bytes, *offsets: int) -> bytes:
    found = bytearray(data)
    for offset in offsets:
        found[offset] ^= 1
    return bytes(found)


def write(tier: MemoryTier | DiskNodeTier, data: bytes, **fields: int) -> ShardRecord:
    header = shard_header(len(data), **fields)  # type: ignore[arg-type]
    return tier.write_shard(header, BytesSource(data))


def bytes_of(tier: MemoryTier | DiskNodeTier, record: ShardRecord) -> bytes:
    with tier.open_shard(record.ref) as reader:
        reader.verify()
        return b"".join(bytes(piece) for piece in reader.read_payload())


def test_what_a_rank_of_the_same_step_has_is_not_sent(pair: Pair) -> None:
    source, data = MemoryTier(), payload(SIZE)
    mine = changed(data, 0, SIZE - 1)
    record = write(source, mine, rank=0)
    write(pair.tier, data, rank=1)
    sent = pair.send(source, record)
    assert sent <= 2 * CHUNK + OVERHEAD
    assert bytes_of(pair.tier, record) == mine


def test_what_the_same_rank_had_before_is_not_sent(pair: Pair) -> None:
    source, data = MemoryTier(), payload(SIZE)
    first, second = write(source, data, step=10), write(source, changed(data, 5 * MIB), step=20)
    assert pair.send(source, first) > SIZE
    assert pair.send(source, second) <= CHUNK + OVERHEAD
    assert bytes_of(pair.tier, second) == changed(data, 5 * MIB)
    # The copy depends on no other file.
    pair.tier.delete_checkpoint(first.ref.job_uid, first.checkpoint)
    assert bytes_of(pair.tier, second) == changed(data, 5 * MIB)


def test_other_states_are_sent_whole(pair: Pair) -> None:
    source = MemoryTier()
    record = write(source, payload(SIZE, seed=1), rank=0)
    write(pair.tier, payload(SIZE, seed=2), rank=1)
    assert pair.send(source, record) > SIZE
    assert bytes_of(pair.tier, record) == payload(SIZE, seed=1)


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1])
def test_small_states(pair: Pair, size: int) -> None:
    source = MemoryTier()
    record = write(source, payload(size), rank=0)
    write(pair.tier, payload(size), rank=1)
    assert pair.send(source, record) <= OVERHEAD
    assert bytes_of(pair.tier, record) == payload(size)


def test_outside_tls_as_well(pair: Pair) -> None:
    pair.handler.plain = True
    source, data = MemoryTier(), payload(SIZE)
    record = write(source, changed(data, 3 * MIB), rank=0)
    write(pair.tier, data, rank=1)
    plain = BulkOptions(connect_seconds=60, io_seconds=60, attempts=1, plain=True)
    with source.open_shard(record.ref) as reader:
        sent = send_copy("127.0.0.1", pair.port, SERVER, pair.client, ROUND, reader, options=plain)
    assert sent <= CHUNK + OVERHEAD
    assert bytes_of(pair.tier, record) == changed(data, 3 * MIB)


def test_a_broken_copy_goes_on_with_what_is_still_missing(pair: Pair) -> None:
    source, data = MemoryTier(), payload(SIZE)
    mine = changed(data, *range(0, 6 * MIB, CHUNK))  # 24 chunks differ, the receiver has the rest
    record = write(source, mine, rank=0)
    write(pair.tier, data, rank=1)
    cutter = Cutter(pair.port, [5 * MIB])
    try:
        sent = pair.send(source, record, cutter.port)
    finally:
        cutter.close()
    assert cutter.connections == 2
    assert sent < 3 * MIB
    assert bytes_of(pair.tier, record) == mine


def test_a_bad_source_is_quarantined_and_the_sender_asked_for_more(
    certificates: tuple[TlsFiles, TlsFiles], tmp_path: Path
) -> None:
    tier = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    tier.open()
    source, data = MemoryTier(), payload(SIZE)
    record = write(source, data, rank=0)
    other = write(tier, data, rank=1)
    (path,) = tmp_path.rglob("*.shard")
    flip_bit(path, 4096 + SIZE // 2)
    for pair in started(certificates, tier):  # type: ignore[arg-type]
        assert pair.send(source, record) > SIZE // 2
        assert bytes_of(tier, record) == data
    assert tier.find(other.ref) is None


def test_a_source_that_cannot_be_opened_is_none(certificates: tuple[TlsFiles, TlsFiles]) -> None:
    inner, faults = MemoryTier(), Faults()
    source, data = MemoryTier(), payload(SIZE)
    record = write(source, data, rank=0)
    write(inner, data, rank=1)
    faults.add(Fault("open_shard", FaultKind.ERR, error=UnavailableError("no descriptors")))
    for pair in started(certificates, FaultyNodeTier(inner, faults)):  # type: ignore[arg-type]
        assert pair.send(source, record) > SIZE
    assert bytes_of(inner, record) == data


def table_of(pair: Pair, ref: ShardRef) -> ChunkTable:
    peer = Peer("127.0.0.1", pair.port, SERVER, pair.client, OPTIONS)
    with PeerShard.open(peer, ROUND, ref) as shard:
        return shard.trailer.table


def test_the_table_of_a_shard_is_bound_to_its_digest(pair: Pair) -> None:
    record = write(pair.tier, payload(SIZE))
    with pair.tier.open_shard(record.ref) as reader:
        assert table_of(pair, record.ref) == reader.table
    with pytest.raises(NotFoundError):
        table_of(pair, write(MemoryTier(), payload(10)).ref)


def test_a_table_of_another_shard_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends the trailer of another shard under the requested name."""
    record = write(pair.tier, payload(SIZE))
    other = write(MemoryTier(), payload(SIZE, seed=3)).ref
    honest = pair.tier.open_shard
    monkeypatch.setattr(pair.tier, "open_shard", lambda ref: honest(record.ref))
    with pytest.raises(CorruptionError):
        table_of(pair, other)
