"""A pack is compressed part by part: equal parts, the right checksums, bounded memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.builders import payload, shard_header, weights
from tests.support.shards.shard_files import flip_bit, write_shard

from holdfast_core.errors import CorruptionError
from holdfast_core.format.canonical import crc32c
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.coding import ChunkDecoder
from holdfast_core.shards.file import FOOTER, Trailer
from holdfast_core.shards.pack import WIDTHS, index_bytes_of, unpack_index, unshared_index
from holdfast_core.store.s3.upload import MAX_BUFFERED_BYTES, PartSizes, part_sizes
from holdfast_core.store.upload import CompressedPack
from holdfast_core.tiers.objects import ObjectInfo, info_of

MIB = 1 << 20
CHUNK = 65_536
DATA = weights(5 * CHUNK + 100)


def pack_of(reader: DiskShardReader) -> CompressedPack:
    index = unshared_index(Trailer(reader.record, reader.table))
    return CompressedPack(reader, index, bytes([4] * len(index.places)))


@pytest.mark.parametrize("part_bytes", [7000, 30_000, 60_000, 1 << 30])
def test_the_parts_make_up_the_object(tmp_path: Path, part_bytes: int) -> None:
    with write_shard(tmp_path, shard_header(len(DATA), chunk_bytes=CHUNK), DATA) as reader:
        pack = pack_of(reader)
        parts = list(pack.parts(part_bytes))
        assert list(pack.parts(part_bytes)) == parts, "an upload that begins again sends the same"
    bodies = [b"".join(part.data()) for part in parts]
    whole = b"".join(bodies)
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {len(body) for body in bodies[:-1]} <= {part_bytes}
    assert 0 < len(bodies[-1]) <= part_bytes
    assert info_of(parts) == ObjectInfo(len(whole), crc32c(whole))
    for part, body in zip(parts, bodies, strict=True):
        assert (part.length_bytes, part.crc32c) == (len(body), crc32c(body))
    index = unpack_index(whole[-index_bytes_of(whole[-FOOTER.size :]) :], len(whole))
    assert index == pack.index
    place = bytearray(CHUNK)
    stored = memoryview(whole)[index.coding.starts[2] : index.coding.starts[3]]
    ChunkDecoder().decode(stored, index.coding.widths[2], memoryview(place))
    assert place == DATA[2 * CHUNK : 3 * CHUNK]


def some_payloads() -> st.SearchStrategy[bytes]:
    pieces = st.sampled_from((b"\0" * 3000, weights(5000), payload(4100), b"end"))
    return st.lists(pieces | st.binary(max_size=20), max_size=6).map(b"".join)


@given(some_payloads(), st.integers(500, 20_000), st.data())
def test_every_chunk_is_read_by_its_index(
    data: bytes, part_bytes: int, choose: st.DataObject
) -> None:
    """This holds for any payload, with any widths, in parts of any length."""
    with (
        tempfile.TemporaryDirectory() as folder,
        write_shard(Path(folder), shard_header(len(data), chunk_bytes=4096), data) as reader,
    ):
        index = unshared_index(Trailer(reader.record, reader.table))
        if index is None:
            assert data == b""
            return
        count = len(index.places)
        widths = choose.draw(st.lists(st.sampled_from(WIDTHS), min_size=count, max_size=count))
        parts = CompressedPack(reader, index, bytes(widths)).parts(part_bytes)
        whole = b"".join(data for part in parts for data in part.data())
    found = unpack_index(whole[-index_bytes_of(whole[-FOOTER.size :]) :], len(whole))
    assert found.trailer == Trailer(reader.record, reader.table)
    assert found.stored_bytes <= len(data) == found.payload_bytes_here
    if found.coding is None:
        assert whole[: len(data)] == data, "no chunk became shorter"
        return
    came_back = b""
    for chunk in range(count):
        place = bytearray(min(4096, len(data) - chunk * 4096))
        stored = whole[found.coding.starts[chunk] : found.coding.starts[chunk + 1]]
        width = found.coding.widths[chunk]
        ChunkDecoder().decode(memoryview(stored), width, memoryview(place))
        came_back += place
    assert came_back == data


def test_a_chunk_that_was_damaged_on_the_node_is_not_compressed(tmp_path: Path) -> None:
    with write_shard(tmp_path, shard_header(len(DATA), chunk_bytes=CHUNK), DATA) as reader:
        flip_bit(next(tmp_path.iterdir()), 4096 + 3 * CHUNK)
        with pytest.raises(CorruptionError, match="chunk 3"):
            list(pack_of(reader).parts(7000))


@given(st.integers(0, 1 << 42), st.integers(5, 5120).map(lambda mib: mib * MIB), st.integers(1, 64))
def test_memory_is_bounded_and_parts_are_few_enough(
    payload_bytes: int, part_bytes: int, at_once: int
) -> None:
    index_bytes = payload_bytes // 5000
    limit = payload_bytes + payload_bytes // 1024
    sizes = part_sizes(limit, part_bytes, at_once, in_memory=True)
    assert sizes.part_bytes % MIB == 0
    assert sizes.part_bytes >= 5 * MIB
    assert 1 <= sizes.at_once <= at_once
    assert (payload_bytes + index_bytes) / sizes.part_bytes <= 10_000
    held = (sizes.at_once + 2) * sizes.part_bytes
    # 10,000 parts of 16 MiB are 156 GiB. A rank with more keeps three parts of any size in memory.
    assert held <= MAX_BUFFERED_BYTES or (sizes.at_once == 1 and payload_bytes > 150 << 30)


def test_a_usual_upload_buffers_four_parts() -> None:
    sizes = part_sizes(16 << 30, 32 * MIB, 4, in_memory=True)
    assert (sizes.part_bytes, sizes.at_once) == (8 * MIB, 4)


def test_no_file_needs_more_than_ten_thousand_parts() -> None:
    assert part_sizes(1 << 40, 32 * MIB, 4, in_memory=False) == PartSizes(105 * MIB, 4)
    assert part_sizes(1 << 30, 1 * MIB, 4, in_memory=False) == PartSizes(5 * MIB, 4)
