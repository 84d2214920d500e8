"""Parts of a shard file: their spans, and checksums that are those of the bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.builders import shard_header
from tests.support.shards.shard_files import flip_bit, write_shard

from holdfast_core.errors import CorruptionError
from holdfast_core.format.digest import crc32c
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.store.upload.parts import crc_between, part_spans, plan_parts

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


@given(before=st.binary(max_size=50), between=st.binary(max_size=50), after=st.binary(max_size=50))
def test_the_checksum_between_two_known_ones(before: bytes, between: bytes, after: bytes) -> None:
    whole = crc32c(before + between + after)
    known = crc32c(before), len(between), crc32c(after), len(after)
    assert crc_between(whole, *known) == crc32c(between)


@pytest.mark.parametrize("part_bytes", [10_000, 70_000, 65_536])
@pytest.mark.parametrize("position", [0, 9_000, 65_535, 65_536, 100_000, 4 * 65_536 - 1])
def test_a_flipped_bit_of_the_payload_never_gets_a_checksum_of_its_own(
    tmp_path: Path, part_bytes: int, position: int
) -> None:
    """Whatever part boundaries cut: some part then has another checksum than its bytes, and the
    checksum of the whole is still that of the tensors."""
    reader, path = open_shard(tmp_path, 4 * 65_536)
    before = plan_parts(reader, part_bytes)
    flip_bit(path, 4096 + position)
    plan, data = plan_parts(reader, part_bytes), path.read_bytes()
    assert plan.crc32c == before.crc32c
    bad = [p for p in plan.parts if p.crc32c != crc32c(data[p.span.start : p.span.stop])]
    assert bad != []


def test_most_of_a_file_is_not_read(tmp_path: Path) -> None:
    """With the real sizes a boundary cuts one block from a chunk."""
    payload = 3 * 32 * MIB
    reader = write_shard(tmp_path, shard_header(payload), bytes(payload))
    before = _bytes_read()
    plan_parts(reader, 32 * MIB)
    assert _bytes_read() - before < 64 << 10


def _bytes_read() -> int:
    """By this process, from files and the page cache alike."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_a_file_that_is_too_short_is_said(tmp_path: Path) -> None:
    reader, path = open_shard(tmp_path, 4 * 65_536)
    os.truncate(path, 4096 + 10_000)
    with pytest.raises(CorruptionError, match=r"ends at byte \d+, expected 270336 bytes"):
        plan_parts(reader, 10_000)
