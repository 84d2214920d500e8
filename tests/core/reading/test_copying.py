"""A payload that is assembled from ranges equals the unsharded state, whatever the sources do."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.builders import BytesSource, shard_header
from tests.support.shards.placements import (
    Placement,
    Tensor,
    bytes_read,
    layout_of,
    objects_of,
    planned,
    shards_of,
)
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import CorruptionError, UnavailableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import ByteRange, Rank
from holdfast_core.reading import Copying, check_source
from holdfast_core.reshard.plan import by_source, payload_plan
from holdfast_core.shards.file import Trailer
from holdfast_core.tiers.base import ShardReader
from holdfast_core.tiers.sources import ReaderSource

CHUNK = 4096
SHAPES = {"rows": (96, 40), "columns": (24, 130), "copy": (70, 9)}
WHOLE = {
    fqn: np.random.default_rng(7).integers(0, 1 << 30, shape, dtype=np.int32)
    for fqn, shape in SHAPES.items()
}

MESHES: list[tuple[list[int], Placement]] = [
    ([1], [None]),
    ([4], [0]),
    ([3], [0]),
    ([4], [1]),
    ([2, 2], [0, 1]),
    ([2, 2], [None, 0]),
]


def layouts(mesh: list[int], placement: Placement) -> list[RankLayout]:
    tensors = {fqn: Tensor("I32", shape, placement) for fqn, shape in SHAPES.items()}
    tensors["copy"] = Tensor("I32", SHAPES["copy"])
    return [layout_of(tensors, mesh, rank) for rank in range(int(np.prod(mesh)))]


def payload_of(layout: RankLayout, saved_by: int) -> bytes:
    """Cut the payload out of the unsharded tensors, by indices and not by the plan."""
    data = bytearray(layout.payload_bytes)
    header = payload_plan(layout).header
    data[: len(header)] = header
    for fqn, item in layout.tensors.items():
        cut = tuple(slice(a, a + n) for a, n in zip(item.offsets, item.lengths, strict=True))
        data[item.byte_range.start : item.byte_range.stop] = WHOLE[fqn][cut].tobytes()
    place = layout.objects["state"]
    data[place.start : place.stop] = objects_of(saved_by)
    return bytes(data)


class Target:
    def __init__(self, layout: RankLayout) -> None:
        self.data = bytearray(layout.payload_bytes)
        header = payload_plan(layout).header
        self.data[: len(header)] = header

    def write_payload(self, offset: int, data: memoryview) -> None:
        assert offset + len(data) <= len(self.data)
        self.data[offset : offset + len(data)] = data


@dataclass
class Flaky:
    """A source that yields so many runs, of which it takes some ahead, and then fails. If `error` is None,
    it stops without an error."""

    inner: ReaderSource
    runs: int
    ahead: int
    error: Exception | None
    chunk_bytes: int | None = None
    """Chunk size that the source claims."""

    @property
    def trailer(self) -> Trailer:
        found = self.inner.trailer
        if self.chunk_bytes is None:
            return found
        header = replace(found.record.header, chunk_bytes=self.chunk_bytes)
        return Trailer(replace(found.record, header=header), found.table)

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        source = iter(wanted)
        taken: deque[range] = deque()
        for _ in range(self.runs):
            taken.extend(itertools.islice(source, self.ahead + 1 - len(taken)))
            if not taken:
                return
            yield from self.inner.read([taken.popleft()])
        if self.error is not None:
            raise self.error


class Saved:
    """Shards of the ranks of a mesh, with small chunks."""

    def __init__(self, mesh: list[int], placement: Placement) -> None:
        self.tier = ScratchTier()
        self.ranks = layouts(mesh, placement)
        self.records = [
            self.tier.write_shard(
                shard_header(
                    layout.payload_bytes,
                    rank=layout.rank,
                    world_size=len(self.ranks),
                    layout=digest_of(layout.to_bytes()),
                    chunk_bytes=CHUNK,
                ),
                BytesSource(payload_of(layout, layout.rank)),
            )
            for layout in self.ranks
        ]

    def source(self, rank: Rank) -> ReaderSource:
        return ReaderSource(self.tier.open_shard(self.records[rank].ref))


@given(
    st.sampled_from(MESHES),
    st.sampled_from(MESHES),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.booleans()), max_size=4),
    st.sampled_from([1, 3 * CHUNK]),
)
def test_what_is_assembled_is_the_unsharded_state(
    old: tuple[list[int], Placement],
    new: tuple[list[int], Placement],
    failures: list[tuple[int, int, bool]],
    limit_bytes: int,
) -> None:
    saved = Saved(*old)
    sizes = [layout.payload_bytes for layout in saved.ranks]
    targets = layouts(*new)
    for wanted in targets:
        target = Target(wanted)
        moves = planned(wanted, saved.ranks, len(targets))
        read_bytes = 0
        for rank, group in by_source(moves).items():
            copying = Copying(group)
            for runs, ahead, silent in failures:
                error = None if silent else UnavailableError("gone in the middle")
                with (
                    saved.source(rank) as source,
                    contextlib.suppress(UnavailableError, CorruptionError),
                ):
                    copying.take(Flaky(source, runs, ahead, error), target, limit_bytes)
            with saved.source(rank) as source:
                copying.take(source, target, limit_bytes)
            read_bytes += copying.read_bytes
        assert bytes(target.data) == payload_of(wanted, wanted.rank % len(saved.ranks))
        assert read_bytes == bytes_read(moves, sizes, CHUNK), "a chunk is read once, or again"


def test_a_source_that_ends_early_without_an_error_is_a_failure() -> None:
    saved = Saved([4], [0])
    (wanted,) = layouts([1], [None])
    moves = by_source(planned(wanted, saved.ranks, 1))[Rank(1)]
    copying = Copying(moves)
    with (
        saved.source(Rank(1)) as source,
        pytest.raises(CorruptionError, match="received no bytes for"),
    ):
        copying.take(Flaky(source, 1, 0, None), Target(wanted), CHUNK)


def test_a_source_with_other_chunks_restarts_the_reads() -> None:
    """The first source reports a wrong chunk size, so the missing ranges do not match the true chunks."""
    saved = Saved([4], [0])
    (wanted,) = layouts([1], [None])
    target = Target(wanted)
    for rank, moves in by_source(planned(wanted, saved.ranks, 1)).items():
        copying = Copying(moves)
        with saved.source(rank) as source:
            liar = Flaky(source, 0, 1, UnavailableError("gone"), 2 * CHUNK)
            with pytest.raises(UnavailableError):
                copying.take(liar, target, CHUNK)
            copying.take(source, target, CHUNK)
    assert bytes(target.data) == payload_of(wanted, 0)


def test_only_the_shard_that_the_manifest_names_is_read() -> None:
    saved = Saved([2, 2], [0, 1])
    record = saved.records[1]
    shard = msgspec.structs.replace(
        shards_of(saved.ranks)[1], blake3=record.blake3, chunk_table=record.chunk_table
    )
    check_source(record, shard)
    other = digest_of(b"another table")
    for wrong in (
        msgspec.structs.replace(shard, rank=Rank(2)),
        msgspec.structs.replace(shard, payload_bytes=shard.payload_bytes + 1),
        msgspec.structs.replace(shard, blake3=other),
        msgspec.structs.replace(shard, chunk_table=other),
        msgspec.structs.replace(shard, layout=other),
    ):
        with pytest.raises(CorruptionError, match="according to the manifest"):
            check_source(record, wrong)


class WrongBytes:
    """A reader whose bytes are wrong although their CRC32C was found right."""

    def __init__(self, reader: ShardReader) -> None:
        self.record, self.table, self.close = reader.record, reader.table, reader.close
        self._reader = reader

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        self._reader.read_payload_into(offset, buffer)
        buffer[0] ^= 1

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        for view in self._reader.read_file(ranges):
            yield memoryview(bytes([view[0] ^ 1]) + bytes(view[1:]))


@pytest.mark.parametrize("runs", [[range(2)], [range(2), range(2, 5)]])
def test_bytes_of_a_file_are_compared_by_blake3(runs: list[range]) -> None:
    saved = Saved([1], [None])
    wrong: Any = WrongBytes(saved.tier.open_shard(saved.records[0].ref))
    with ReaderSource(wrong) as source, pytest.raises(CorruptionError, match="BLAKE3 of chunk 0"):
        list(source.read(runs))


def test_a_run_that_is_longer_than_one_read_of_a_file_is_in_one_piece() -> None:
    data = bytes(range(256)) * (40 << 10)
    tier = ScratchTier()
    record = tier.write_shard(shard_header(len(data), chunk_bytes=1 << 20), BytesSource(data))
    with ReaderSource(tier.open_shard(record.ref)) as source:
        found = [bytes(view) for view in source.read([range(6), range(6, 10)])]
    assert found == [data[: 6 << 20], data[6 << 20 :]]
