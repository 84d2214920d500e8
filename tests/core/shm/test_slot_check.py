"""A slot is checked for a shard by the chunk table of the node tier, or by BLAKE3 without a table."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.shards.builders import BytesSource, payload, shard_header

from holdfast_core.errors import FormatError
from holdfast_core.ids import Rank, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import CHUNK_BYTES, ShardRecord
from holdfast_core.shm.slot_file import (
    HEADER_BYTES,
    SlotFile,
    SlotHeader,
    SlotState,
    kept_slot,
    slot_holds,
)

NAME = "rank000000.0.slot"
SIZES = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 17]
"""Sizes of no chunk, one chunk, two chunks, and as many as two threads share."""


def written(tier: DiskNodeTier, data: bytes) -> ShardRecord:
    return tier.write_shard(shard_header(len(data)), BytesSource(data))


@pytest.fixture
def tier(tmp_path: Path) -> DiskNodeTier:
    tier = DiskNodeTier(tmp_path / "node", capacity_bytes=256 << 20)
    tier.open()
    return tier


@pytest.fixture(params=[True, False], ids=["table", "blake3"])
def has_table(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def holds(directory: Path, tier: DiskNodeTier, record: ShardRecord, has_table: bool) -> bool:
    if not has_table:
        tier.delete_shard(record.ref)
    slot = SlotFile.open(directory, NAME)
    try:
        return slot_holds(slot, tier, record.ref, record.header.payload_bytes)
    finally:
        slot.close()


@pytest.mark.parametrize("size", SIZES)
def test_the_same_bytes(tmp_path: Path, tier: DiskNodeTier, size: int, has_table: bool) -> None:
    data = payload(size)
    record = written(tier, data)
    (tmp_path / NAME).write_bytes(bytes(HEADER_BYTES) + data + b"behind it")
    assert holds(tmp_path, tier, record, has_table)


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, 3 * CHUNK_BYTES, 5 * CHUNK_BYTES + 16])
def test_a_slot_with_one_other_bit_does_not_hold_the_shard(
    tmp_path: Path, tier: DiskNodeTier, position: int, has_table: bool
) -> None:
    data = bytearray(payload(5 * CHUNK_BYTES + 17))
    record = written(tier, bytes(data))
    data[position] ^= 0x10
    (tmp_path / NAME).write_bytes(bytes(HEADER_BYTES) + data)
    assert not holds(tmp_path, tier, record, has_table)


def test_a_slot_that_was_truncated(tmp_path: Path, tier: DiskNodeTier, has_table: bool) -> None:
    data = payload(5 * CHUNK_BYTES)
    record = written(tier, data)
    (tmp_path / NAME).write_bytes(bytes(HEADER_BYTES) + data[:-1])
    with pytest.raises(FormatError, match="was it truncated"):
        holds(tmp_path, tier, record, has_table)


def test_a_bad_shard_in_the_tier_does_not_make_the_slot_bad(
    tmp_path: Path, tier: DiskNodeTier
) -> None:
    data = payload(5 * CHUNK_BYTES)
    record = written(tier, data)
    (path,) = (tmp_path / "node").rglob("*.shard")
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"0123456789")
    (tmp_path / NAME).write_bytes(bytes(HEADER_BYTES) + data)
    assert holds(tmp_path, tier, record, True)


def kept(
    directory: Path, tier: DiskNodeTier, record: ShardRecord, header: SlotHeader, data: bytes
) -> str | None:
    """Return the kept slot of a missing one and one with this header. A slot that is FULL is in use."""
    (directory / NAME).write_bytes(header.pack().ljust(HEADER_BYTES, b"\0") + data)
    return kept_slot(
        ["rank000000.1.slot", NAME],
        record.ref,
        len(data),
        lambda name: SlotFile.open(directory, name),
        lambda slot: slot.header().state is SlotState.FREE,
        tier,
    )


@pytest.mark.fault("A slot that a rank offers for a restore does not hold the shard, or is gone")
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({}, NAME, id="it holds the shard"),
        pytest.param({"state": SlotState.FULL}, None, id="it is in use"),
        pytest.param({"state": SlotState.FILLING}, None, id="it was filled in part"),
        pytest.param({"step": Step(99)}, None, id="it holds another step"),
    ],
)
def test_the_slot_that_still_holds_a_shard_is_found(
    tmp_path: Path, tier: DiskNodeTier, changed: dict[str, Any], expected: str | None
) -> None:
    data = payload(CHUNK_BYTES + 1)
    record = written(tier, data)
    ref, size = record.ref, len(data)
    header = SlotHeader(SlotState.FREE, Rank(0), size, ref.round, ref.step, size)
    assert kept(tmp_path, tier, record, replace(header, **changed), data) == expected
    assert kept(tmp_path, tier, record, header, bytes(size)) is None, "other bytes"
