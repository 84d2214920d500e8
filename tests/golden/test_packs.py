"""Packs and references of every version stay readable. Those of this version are written bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.make_packs import (
    BASE,
    CHUNK_BYTES,
    CODED_FOLDER,
    CODED_WIDTHS,
    FOLDER,
    coded_files,
    coded_payload,
    golden_files,
)

from holdfast_core.shards.coding import ChunkDecoder
from holdfast_core.shards.file import (
    FOOTER,
    head_bytes,
    pack_head,
    pack_trailer,
    trailer_offset,
    unpack_head,
)
from holdfast_core.shards.pack import PackIndex, index_bytes_of, unpack_index

CODED = sorted(FOLDER.parent.glob("pack_v*_compressed"))
PLAIN = sorted({*FOLDER.parent.glob("pack_v*")} - {*CODED})


def read(name: str, folder: Path) -> bytes:
    return (folder / name).read_bytes()


def index_of(pack: bytes) -> PackIndex:
    length = index_bytes_of(pack[-FOOTER.size :])
    return unpack_index(pack[-length:], len(pack))


def test_the_newest_files_are_still_written_bit_for_bit() -> None:
    assert golden_files() == {path.name: path.read_bytes() for path in FOLDER.iterdir()}


@pytest.mark.parametrize("folder", PLAIN, ids=lambda folder: folder.name)
def test_a_pack_reads_and_makes_the_shard_file(folder: Path) -> None:
    pack = read("step20-rank1.pack", folder)
    index = index_of(pack)
    assert index.places.tolist() == [1, 1, 0, 2]
    assert [(s.step, s.round, s.rank) for s in index.sources] == [(10, 0, 1), (20, 3, 0)]
    assert index.base == BASE
    head = head_bytes(index.header)
    base, other = (read(f"{name}.shard", folder) for name in ("step10-rank1", "step20-rank0"))
    chunks = (
        base[head : head + 2 * CHUNK_BYTES],
        pack[:CHUNK_BYTES],
        other[head + 3 * CHUNK_BYTES : head + index.header.payload_bytes],
    )
    body = b"".join(chunks).ljust(trailer_offset(index.header) - head, b"\0")
    end = pack_trailer(index.header, index.blake3, index.table)
    assert pack_head(index.header) + body + end == read("step20-rank1.shard", folder)


@pytest.mark.parametrize("folder", CODED, ids=lambda folder: folder.name)
def test_a_compressed_pack_reads_and_makes_the_payload(folder: Path) -> None:
    pack = read("step20-rank1.pack", folder)
    index = index_of(pack)
    coding, payload = index.coding, coded_payload()
    assert coding is not None
    assert index.places.tolist() == [0, 0, 0, 0, 0, 1, 0]
    assert tuple(coding.widths) == (*CODED_WIDTHS[:5], 0, 0)
    for number, width in enumerate(coding.widths):
        chunk = payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        if index.places[number]:
            base = read("step10-rank1.shard", folder)
            start = head_bytes(unpack_head(base)) + number * CHUNK_BYTES
            assert base[start : start + CHUNK_BYTES] == chunk
            continue
        place = bytearray(len(chunk))
        stored = memoryview(pack)[coding.starts[number] : coding.starts[number + 1]]
        ChunkDecoder().decode(stored, width, memoryview(place))
        assert place == chunk
        assert (len(stored) < len(chunk)) is (width > 0)
    end = pack_trailer(index.header, index.blake3, index.table)
    body = payload.ljust(trailer_offset(index.header) - head_bytes(index.header), b"\0")
    assert pack_head(index.header) + body + end == read("step20-rank1.shard", folder)


def test_around_compressed_chunks_it_is_still_written_bit_for_bit() -> None:
    """Only zstd determines the compressed chunks, so they are taken from the file."""
    pack = read("step20-rank1.pack", CODED_FOLDER)
    coding = index_of(pack).coding
    assert coding is not None
    chunks = [pack[coding.starts[n] : coding.starts[n + 1]] for n in range(len(coding.widths))]
    assert coded_files(chunks) == {p.name: p.read_bytes() for p in CODED_FOLDER.iterdir()}
