from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.shards.builders import payload, shard_file, shard_header

from holdfast_core.errors import CorruptionError, FormatError, UnknownVersionError
from holdfast_core.format.canonical import crc32c
from holdfast_core.ids import Digest, JobUid, ShardRef
from holdfast_core.shards.file import (
    BLOCK_BYTES,
    FOOTER,
    ChunkTable,
    ShardHeader,
    file_bytes,
    head_bytes,
    head_bytes_of,
    pack_head,
    pack_trailer,
    trailer_bytes,
    trailer_bytes_of,
    trailer_offset,
    unpack_head,
    unpack_trailer,
)
from holdfast_core.shards.stream import ShardStream

FILE, RECORD = shard_file(shard_header(3 * 4096 + 5, chunk_bytes=4096), payload(3 * 4096 + 5))


def verify(data: bytes, ref: ShardRef = RECORD.ref) -> None:
    stream = ShardStream(ref, len(data))
    stream.feed(memoryview(data))
    stream.finish()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 << 20])
def test_a_shard_file_is_read_from_its_head_or_its_footer(size: int) -> None:
    header = shard_header(size)
    file, record = shard_file(header, payload(size))
    assert len(file) == file_bytes(header) == record.file_bytes
    assert len(file) % BLOCK_BYTES == head_bytes(header) % BLOCK_BYTES == 0
    assert head_bytes_of(file[:16]) == head_bytes(header)
    assert unpack_head(file) == header
    assert trailer_bytes_of(file[-FOOTER.size :]) == trailer_bytes(header)
    assert unpack_trailer(file[trailer_offset(header) :]).record == record
    verify(file, record.ref)


@settings(max_examples=400)
@given(st.integers(0, len(FILE) * 8 - 1))
def test_no_flipped_bit_goes_unseen(bit: int) -> None:
    bad = bytearray(FILE)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        verify(bytes(bad))


def test_no_flipped_bit_of_head_or_trailer_goes_unseen() -> None:
    interesting = [
        *range(head_bytes(RECORD.header)),
        *range(trailer_offset(RECORD.header), len(FILE)),
    ]
    for position in interesting[::7]:
        bad = bytearray(FILE)
        bad[position] ^= 0x04
        with pytest.raises(FormatError):
            verify(bytes(bad))


@settings(max_examples=100)
@given(st.integers(0, len(FILE) // 512 - 1), st.integers(1, 20))
def test_no_zeroed_sectors_go_unseen(start: int, count: int) -> None:
    bad = bytearray(FILE)
    stop = min(len(FILE), (start + count) * 512)
    bad[start * 512 : stop] = bytes(stop - start * 512)
    if bytes(bad) == FILE:
        return
    with pytest.raises(CorruptionError):
        verify(bytes(bad))


@settings(max_examples=60)
@given(st.integers(0, len(FILE) - 1))
def test_no_truncation_goes_unseen(size: int) -> None:
    with pytest.raises(CorruptionError):
        verify(FILE[:size])


def test_an_extended_file_is_refused() -> None:
    with pytest.raises(CorruptionError):
        verify(FILE + bytes(4096))


def test_a_spliced_file_is_refused() -> None:
    other = shard_header(3 * 4096 + 5, chunk_bytes=4096, step=11)
    file, record = shard_file(other, payload(3 * 4096 + 5))
    with pytest.raises(CorruptionError):
        verify(FILE[:8192] + file[8192:])
    with pytest.raises(CorruptionError):
        verify(file[:8192] + FILE[8192:], record.ref)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=40))
def test_pieces_of_any_size(sizes: list[int]) -> None:
    stream = ShardStream(RECORD.ref, len(FILE))
    view = memoryview(FILE)
    position = 0
    turn = 0
    while position < len(FILE):
        piece = view[position : position + sizes[turn % len(sizes)]]
        stream.feed(piece)
        position += len(piece)
        assert stream.position == position
        turn += 1
    assert stream.finish().record == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"payload_bytes": -1},
        {"payload_bytes": 1 << 63},
        {"payload_bytes": 1 << 50, "chunk_bytes": 4096},
        {"chunk_bytes": 0},
        {"chunk_bytes": 4097},
        {"chunk_bytes": 128 << 20},
        {"rank": 4},
        {"rank": -1},
        {"world_size": 0},
        {"step": 10**12},
        {"round": -1},
        {"job_uid": JobUid("../x")},
        {"layout": Digest("b3:short")},
    ],
    ids=str,
)
def test_headers_out_of_bounds_are_not_written(change: dict[str, object]) -> None:
    header: ShardHeader = replace(shard_header(10), **change)  # type: ignore[arg-type]
    with pytest.raises(FormatError):
        pack_head(header)


def test_a_head_that_claims_a_gigabyte_is_refused_at_once() -> None:
    with pytest.raises(CorruptionError, match="at most"):
        head_bytes_of(struct.pack("<8sII", b"HFSHARD1", 1 << 30, 0))


def test_a_newer_version_is_unknown_and_not_corrupt() -> None:
    text = pack_head(shard_header(10))[16:].rstrip(b"\0")
    newer = text.replace(b'"formatVersion":1', b'"formatVersion":2')
    head = struct.pack("<8sII", b"HFSHARD1", len(newer), crc32c(newer)) + newer
    with pytest.raises(FormatError, match="newer release") as caught:
        unpack_head(head.ljust(4096, b"\0"))
    assert not isinstance(caught.value, CorruptionError)


def test_a_table_of_another_length_is_not_written() -> None:
    with pytest.raises(FormatError, match="chunk table of 72 bytes"):
        pack_trailer(RECORD.header, RECORD.blake3, ChunkTable((1, 2), bytes(64)))


def test_a_trailer_of_a_newer_version_is_unknown_and_not_corrupt() -> None:
    trailer = FILE[trailer_offset(RECORD.header) :]
    body = trailer[: -FOOTER.size].replace(b'"formatVersion":1', b'"formatVersion":2')
    footer = struct.pack("<QQI", len(trailer), RECORD.header.payload_bytes, crc32c(body))
    newer = body + footer + struct.pack("<I8s", crc32c(footer), b"HFSHEND1")
    with pytest.raises(UnknownVersionError, match="newer release"):
        unpack_trailer(newer)
