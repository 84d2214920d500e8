"""Copies to a receiver that has some of the chunks: only the rest is sent, and the file is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.peer.bulk_pair import Pair, Wire, bytes_of, write
from tests.support.shards.builders import payload
from tests.support.shards.shard_files import flip_bit
from tests.support.tiers.faulty import Fault, Faults, Faulty
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import StaleRoundError, UnavailableError
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.peer.store import copy_shard
from holdfast_core.shards.file import ShardRecord
from holdfast_core.tiers.base import NodeTier

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


def received(pair: Pair, record: ShardRecord, tier: NodeTier, port: int | None = None) -> int:
    """Copy the shard from the server, and return the bytes that it sent."""
    return pair.copy(tier, record.ref, port).received_bytes


def test_what_a_rank_of_the_same_step_has_is_not_requested(pair: Pair) -> None:
    target, data = ScratchTier(), payload(SIZE)
    mine = changed(data, 0, SIZE - 1)
    record = write(pair.tier, mine, rank=0)
    write(target, data, rank=1)
    assert received(pair, record, target) <= 2 * CHUNK + OVERHEAD
    assert bytes_of(target, record) == mine


def test_what_the_same_rank_had_before_is_not_requested(pair: Pair) -> None:
    target, data = ScratchTier(), payload(SIZE)
    first = write(pair.tier, data, step=10)
    second = write(pair.tier, changed(data, 5 * MIB), step=20)
    assert received(pair, first, target) > SIZE
    assert received(pair, second, target) <= CHUNK + OVERHEAD
    assert bytes_of(target, second) == changed(data, 5 * MIB)
    # The copy depends on no other file.
    target.delete_checkpoint(first.ref.job_uid, first.checkpoint)
    assert bytes_of(target, second) == changed(data, 5 * MIB)


def test_other_states_are_copied_whole(pair: Pair) -> None:
    target = ScratchTier()
    record = write(pair.tier, payload(SIZE, seed=1), rank=0)
    write(target, payload(SIZE, seed=2), rank=1)
    assert received(pair, record, target) > SIZE
    assert bytes_of(target, record) == payload(SIZE, seed=1)


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1])
def test_small_states(pair: Pair, size: int) -> None:
    target = ScratchTier()
    record = write(pair.tier, payload(size), rank=0)
    write(target, payload(size), rank=1)
    assert received(pair, record, target) <= OVERHEAD
    assert bytes_of(target, record) == payload(size)


def test_outside_tls_as_well(pair: Pair) -> None:
    pair.handler.plain = True
    target, data = ScratchTier(), payload(SIZE)
    record = write(pair.tier, changed(data, 3 * MIB), rank=0)
    write(target, data, rank=1)
    copied = pair.copy(target, record.ref, attempts=1, plain=True)
    assert copied.received_bytes <= CHUNK + OVERHEAD
    assert bytes_of(target, record) == changed(data, 3 * MIB)


def test_a_broken_copy_goes_on_with_what_is_still_missing(
    pair: Pair, wires: Callable[..., Wire]
) -> None:
    target, data = ScratchTier(), payload(SIZE)
    mine = changed(data, *range(0, 6 * MIB, CHUNK))  # 24 chunks differ, the receiver has the rest
    record = write(pair.tier, mine, rank=0)
    write(target, data, rank=1)
    wire = wires(cuts=[5 * MIB])
    assert received(pair, record, target, wire.port) <= 6 * MIB + OVERHEAD
    assert wire.connections == 2
    assert bytes_of(target, record) == mine


def test_a_bad_source_is_quarantined_and_the_peer_is_asked_for_its_chunks(
    pair: Pair, tmp_path: Path
) -> None:
    target = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    target.open()
    data = payload(SIZE)
    record = write(pair.tier, data, rank=0)
    other = write(target, data, rank=1)
    (path,) = tmp_path.rglob("*.shard")
    flip_bit(path, 4096 + SIZE // 2)
    assert received(pair, record, target) > SIZE // 4
    assert bytes_of(target, record) == data
    assert target.find(other.ref) is None


def test_a_source_that_cannot_be_opened_is_none(pair: Pair) -> None:
    inner = ScratchTier()
    data = payload(SIZE)
    record = write(pair.tier, data, rank=0)
    write(inner, data, rank=1)
    faults = Faults([Fault("open_shard", UnavailableError("no descriptors"))])
    assert received(pair, record, Faulty(inner, faults)) > SIZE
    assert bytes_of(inner, record) == data


def test_a_copy_of_local_chunks_ends_when_its_round_does(pair: Pair) -> None:
    target, data = ScratchTier(capacity_bytes=64 * MIB), payload(SIZE)
    record = write(pair.tier, data, rank=0)
    other = write(target, data, rank=1)
    calls = 0

    def may_go_on() -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise StaleRoundError("sealed meanwhile", own_round=4)

    with pytest.raises(StaleRoundError):
        copy_shard(pair.peer(), record.ref, target, may_go_on)
    assert target.list_shards() == (other,)
    assert target.free_bytes() == 64 * MIB - other.file_bytes
