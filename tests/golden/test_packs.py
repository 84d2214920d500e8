"""Packs and references of every version stay readable; the newest are still written exactly like that."""

from __future__ import annotations

from tests.golden.make_packs import BASE, CHUNK_BYTES, FOLDER, NEXT, golden_files

from holdfast_core.format.pack import index_bytes_of, unpack_index
from holdfast_core.format.references import parse_references
from holdfast_core.format.shard import FOOTER, head_bytes, pack_head, pack_trailer, trailer_offset


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def test_the_newest_files_are_still_written_bit_for_bit() -> None:
    assert golden_files() == {path.name: path.read_bytes() for path in FOLDER.iterdir()}


def test_a_pack_reads_and_makes_the_shard_file() -> None:
    pack = read("step20-rank1.pack")
    length = index_bytes_of(pack[-FOOTER.size :])
    index = unpack_index(pack[-length:], len(pack))
    assert index.places.tolist() == [1, 1, 0, 2]
    assert [(s.step, s.round, s.rank) for s in index.sources] == [(10, 0, 1), (20, 3, 0)]
    assert index.base == BASE
    head = head_bytes(index.header)
    base, other = read("step10-rank1.shard"), read("step20-rank0.shard")
    chunks = (
        base[head : head + 2 * CHUNK_BYTES],
        pack[:CHUNK_BYTES],
        other[head + 3 * CHUNK_BYTES : head + index.header.payload_bytes],
    )
    body = b"".join(chunks).ljust(trailer_offset(index.header) - head, b"\0")
    end = pack_trailer(index.header, index.blake3, index.table)
    assert pack_head(index.header) + body + end == read("step20-rank1.shard")


def test_references_read() -> None:
    said = parse_references(read("references.json"))
    assert (said.checkpoint, said.bytes_in) == (NEXT, {BASE: 2 * CHUNK_BYTES})
