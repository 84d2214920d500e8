"""Parts of a shard file: their spans, and checksums that are those of the bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import CorruptionError
from holdfast_core.format.digest import crc32c
from holdfast_core.testing.builders import shard_header
from holdfast_core.testing.shard_files import flip_bit, write_shard
from holdfast_core.tiers.disk_shard import DiskShardReader
from holdfast_core.tiers.object_parts import append_crc, part_spans, plan_parts

MIB = 1 << 20


def open_shard(directory: Path, payload_bytes: int) -> tuple[DiskShardReader, Path]:
    identity = shard_header(payload_bytes, chunk_bytes=65_536)
    reader = write_shard(directory, identity, os.urandom(payload_bytes))
    (path,) = directory.iterdir()
    return reader, path


@pytest.mark.parametrize(
    ("size", "part", "expected"),
    [
        (0, 5 * MIB, [(0, 0)]),
        (1, 5 * MIB, [(0, 1)]),
        (5 * MIB, 5 * MIB, [(0, 5 * MIB)]),
        (5 * MIB + 1, 5 * MIB, [(0, 5 * MIB), (5 * MIB, 5 * MIB + 1)]),
    ],
    ids=["empty", "one-byte", "exactly-one", "one-more"],
)
def test_spans(size: int, part: int, expected: list[tuple[int, int]]) -> None:
    assert [(s.start, s.stop) for s in part_spans(size, part)] == expected


def test_no_file_needs_more_than_ten_thousand_parts() -> None:
    spans = part_spans(1 << 40, 32 * MIB)
    assert len(spans) <= 10_000
    assert spans[0].length_bytes == 105 * MIB
    assert spans[-1].stop == 1 << 40


@given(a=st.binary(max_size=200), b=st.binary(max_size=200))
def test_append_is_the_checksum_of_both(a: bytes, b: bytes) -> None:
    assert append_crc(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)


@pytest.mark.parametrize("part_bytes", [5 * MIB, 8 * MIB, 4096, 100_003])
@pytest.mark.parametrize("payload", [0, 1, 65_536, 1_000_000, 1_048_576 * 2])
def test_checksums_are_those_of_the_file(tmp_path: Path, payload: int, part_bytes: int) -> None:
    reader, path = open_shard(tmp_path, payload)
    data = path.read_bytes()
    plan = plan_parts(reader, part_bytes)
    assert plan.size_bytes == len(data)
    assert plan.crc32c == crc32c(data)
    for part in plan.parts:
        assert part.crc32c == crc32c(data[part.span.start : part.span.stop])


def test_whole_chunks_are_not_read_again(tmp_path: Path) -> None:
    """A bit that flipped on the disk must not get a fresh checksum: the store has to refuse it."""
    reader, path = open_shard(tmp_path, 4 * 65_536)
    before = plan_parts(reader, 5 * MIB)
    flip_bit(path, 4096 + 100)
    assert plan_parts(reader, 5 * MIB) == before


def test_a_chunk_that_a_part_cuts_is_verified(tmp_path: Path) -> None:
    reader, path = open_shard(tmp_path, 4 * 65_536)
    flip_bit(path, 4096 + 100)
    with pytest.raises(CorruptionError):
        plan_parts(reader, 10_000)
