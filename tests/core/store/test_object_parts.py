"""Parts of a shard file: their spans, and checksums that match the original bytes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.builders import shard_header
from tests.support.shards.shard_files import flip_bit, write_shard

from holdfast_core.errors import CorruptionError, UnreadableError
from holdfast_core.format.canonical import crc32c
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.store.upload import WholeShard, crc_between
from holdfast_core.tiers.objects import ObjectInfo, Part, info_of

MIB = 1 << 20


Open = Callable[[int], tuple[DiskShardReader, Path]]


@pytest.fixture
def open_shard(tmp_path: Path) -> Iterator[Open]:
    """Return a function that writes and opens the shard of a test. It is closed at the end of the test."""
    with ExitStack() as stack:

        def opened(payload_bytes: int) -> tuple[DiskShardReader, Path]:
            identity = shard_header(payload_bytes, chunk_bytes=65_536)
            reader = stack.enter_context(write_shard(tmp_path, identity, os.urandom(payload_bytes)))
            (path,) = tmp_path.iterdir()
            return reader, path

        yield opened


def parts_of(reader: DiskShardReader, part_bytes: int) -> tuple[Part, ...]:
    return tuple(WholeShard(reader).parts(part_bytes))


def slices(data: bytes, parts: tuple[Part, ...]) -> list[bytes]:
    starts = itertools.accumulate((part.length_bytes for part in parts), initial=0)
    return [
        data[start : start + part.length_bytes] for start, part in zip(starts, parts, strict=False)
    ]


@pytest.mark.parametrize("part_bytes", [5 * MIB, 8 * MIB, 4096, 100_003])
@pytest.mark.parametrize("payload", [0, 1, 65_536, 1_000_000, 1_048_576 * 2])
def test_checksums_are_those_of_the_file(open_shard: Open, payload: int, part_bytes: int) -> None:
    reader, path = open_shard(payload)
    data = path.read_bytes()
    parts = parts_of(reader, part_bytes)
    assert info_of(parts) == ObjectInfo(len(data), crc32c(data))
    assert [part.length_bytes for part in parts[:-1]] == [part_bytes] * (len(parts) - 1)
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    for part, expected in zip(parts, slices(data, parts), strict=True):
        assert part.crc32c == crc32c(expected)
        assert b"".join(part.data()) == expected


def test_whole_chunks_are_not_read_again(open_shard: Open) -> None:
    """A bit that flipped on the disk must not get a new checksum, so that the store refuses it."""
    reader, path = open_shard(4 * 65_536)
    before = parts_of(reader, 5 * MIB)
    flip_bit(path, 4096 + 100)
    assert parts_of(reader, 5 * MIB) == before


@given(before=st.binary(max_size=50), between=st.binary(max_size=50), after=st.binary(max_size=50))
def test_the_checksum_between_two_known_ones_is_computed(
    before: bytes, between: bytes, after: bytes
) -> None:
    whole = crc32c(before + between + after)
    known = crc32c(before), len(between), crc32c(after), len(after)
    assert crc_between(whole, *known) == crc32c(between)


@pytest.mark.parametrize("part_bytes", [10_000, 70_000, 65_536])
@pytest.mark.parametrize("position", [0, 9_000, 65_535, 65_536, 100_000, 4 * 65_536 - 1])
def test_a_flipped_bit_of_the_payload_never_gets_a_checksum_of_its_own(
    open_shard: Open, part_bytes: int, position: int
) -> None:
    """Wherever the boundaries of parts are, the checksum of some part then differs from its bytes, and the
    checksum of the whole is still that of the tensors."""
    reader, path = open_shard(4 * 65_536)
    before = parts_of(reader, part_bytes)
    flip_bit(path, 4096 + position)
    parts, data = parts_of(reader, part_bytes), path.read_bytes()
    assert info_of(parts) == info_of(before)
    found = zip(parts, slices(data, parts), strict=True)
    assert any(part.crc32c != crc32c(stored) for part, stored in found)


def test_most_of_a_file_is_not_read(tmp_path: Path) -> None:
    """With the real sizes, a boundary cuts one block from a chunk."""
    payload = 3 * 32 * MIB
    with write_shard(tmp_path, shard_header(payload), bytes(payload)) as reader:
        before = _bytes_read()
        parts_of(reader, 32 * MIB)
        assert _bytes_read() - before < 64 << 10


def _bytes_read() -> int:
    """Return the bytes that this process has read, from files and from the page cache."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def test_a_file_that_is_too_short_is_an_error(open_shard: Open) -> None:
    reader, path = open_shard(4 * 65_536)
    os.truncate(path, 4096 + 10_000)
    with pytest.raises(CorruptionError, match=r"ends at byte \d+, expected 270336 bytes"):
        parts_of(reader, 10_000)


def test_a_file_that_cannot_be_read_is_no_fault_of_the_store(open_shard: Open) -> None:
    reader, path = open_shard(4 * 65_536)
    whole = parts_of(reader, 1 << 20)
    with path.open("ab") as unreadable:
        os.dup2(unreadable.fileno(), reader.fd)
        with pytest.raises(UnreadableError):
            list(whole[0].data())
        with pytest.raises(UnreadableError):
            parts_of(reader, 10_000)
