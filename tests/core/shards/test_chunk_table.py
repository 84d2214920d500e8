from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import chunk_digest, crc32c, digest_of
from holdfast_core.shards.file import ChunkTable, table_bytes
from holdfast_core.shards.stream import TableDigester

DATA = bytes(range(256)) * 40


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 10_000])
def test_each_chunk_and_the_whole_are_digested(size: int) -> None:
    data = DATA[:size]
    digester = TableDigester(4096)
    digester.update(memoryview(data))
    digest, table = digester.finish()
    chunks = [data[start : start + 4096] for start in range(0, size, 4096)]
    assert table.crcs == tuple(crc32c(chunk) for chunk in chunks)
    assert [table.digest(i) for i in range(len(table))] == [chunk_digest(c) for c in chunks]
    assert digest == digest_of(b"".join(chunk_digest(chunk) for chunk in chunks))


@given(st.lists(st.integers(1, 5000), max_size=8))
def test_how_the_bytes_arrive_does_not_matter(pieces: list[int]) -> None:
    whole, parts = TableDigester(1000), TableDigester(1000)
    data = DATA[: sum(pieces)]
    whole.update(memoryview(data))
    position = 0
    for length in pieces:
        parts.update(memoryview(data)[position : position + length])
        position += length
    assert parts.finish() == whole.finish()


def test_a_packed_table_reads_back() -> None:
    digester = TableDigester(4096)
    digester.update(memoryview(DATA))
    _, table = digester.finish()
    packed = table.pack()
    assert len(packed) == table_bytes(len(table))
    assert ChunkTable.unpack(packed, len(table)) == table
    with pytest.raises(FormatError, match="chunk table"):
        ChunkTable.unpack(packed[:-1], len(table))
