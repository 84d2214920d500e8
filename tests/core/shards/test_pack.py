"""The index of a pack is read as it was written, and a damaged one is refused."""

from __future__ import annotations

import dataclasses
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.builders import JOB_UID, payload
from tests.support.shards.packs import trailer_of

from holdfast_core.errors import CorruptionError, FormatError, UnknownVersionError
from holdfast_core.format.canonical import crc32c
from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, ShardRef, Step
from holdfast_core.shards.file import FOOTER
from holdfast_core.shards.pack import (
    HERE,
    MAX_EARLIER,
    PLAIN,
    ChunkRun,
    Coding,
    PackIndex,
    index_bytes_of,
    pack_index,
    runs_within,
    unpack_index,
    unshared_index,
)

CHUNK = 4096
TRAILER = trailer_of(payload(5 * CHUNK + 100), step=20, rank=1, chunk_bytes=CHUNK)


def ref(step: int, rank: int, *, job_uid: JobUid = JOB_UID, round: int = 0) -> ShardRef:
    digest = TRAILER.record.blake3
    return ShardRef(job_uid, Step(step), RestartRound(round), Rank(rank), digest)


def checkpoint(step: int) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(0))


BASE = checkpoint(10)


def index(
    places: tuple[int, ...] = (0, 1, 1, 0, 2, 0),
    sources: tuple[ShardRef, ...] = (ref(10, 1), ref(20, 0)),
    base: CheckpointId | None = BASE,
) -> PackIndex:
    record = TRAILER.record
    return PackIndex(record.header, record.blake3, TRAILER.table, base, sources, array("H", places))


CODED = dataclasses.replace(
    index(), coding=Coding.of([3000, 0, 0, CHUNK, 0, 40], bytes([4, 0, 0, PLAIN, 0, 1]))
)
"""The pack contains three chunks of a shard with five chunks of 4,096 bytes and one of 100."""


def test_the_index_of_a_compressed_pack_comes_back() -> None:
    data = pack_index(CODED)
    assert index_bytes_of(data[-FOOTER.size :]) == len(data)
    found = unpack_index(data, 3040 + CHUNK + len(data))
    assert found == CODED
    assert (found.stored_bytes, found.payload_bytes_here) == (3040 + CHUNK, 2 * CHUNK + 100)
    assert found.earlier() == {checkpoint(10): 2 * CHUNK}
    assert [(run.chunks, run.place, run.offset) for run in found.runs()] == [
        (range(1), HERE, 0),
        (range(1, 3), 1, 3000),
        (range(3, 4), HERE, 3000),
        (range(4, 5), 2, 3000 + CHUNK),
        (range(5, 6), HERE, 3000 + CHUNK),
    ]


def test_an_index_of_a_newer_version_is_refused_by_its_version() -> None:
    data = pack_index(CODED)
    assert data.startswith(b"HFPACKI1")
    body = data[: -FOOTER.size].replace(
        b'"formatVersion":1,"header"', b'"formatVersion":2,"header"'
    )
    footer = struct.pack("<QQI", len(data), CODED.stored_bytes, crc32c(body))
    newer = body + footer + struct.pack("<I8s", crc32c(footer), b"HFPKEND1")
    with pytest.raises(UnknownVersionError, match=r"version 2 is not supported .*a newer release"):
        unpack_index(newer, CODED.stored_bytes + len(newer))


def coded(lengths: list[int], widths: list[int]) -> PackIndex:
    return dataclasses.replace(index(), coding=Coding.of(lengths, bytes(widths)))


WRONG_CODINGS = {
    "longer than the chunk": coded([CHUNK + 1, 0, 0, CHUNK, 0, 40], [4, 0, 0, 0, 0, 1]),
    "as long as the chunk, yet compressed": coded([CHUNK, 0, 0, CHUNK, 0, 40], [4, 0, 0, 0, 0, 1]),
    "shorter, yet as it is": coded([3000, 0, 0, CHUNK - 1, 0, 40], [4, 0, 0, 0, 0, 1]),
    "the last one longer than it is": coded([3000, 0, 0, CHUNK, 0, 101], [4, 0, 0, 0, 0, 1]),
    "no such width": coded([3000, 0, 0, CHUNK, 0, 40], [3, 0, 0, 0, 0, 1]),
    "bytes of a chunk that is elsewhere": coded([3000, 1, 0, CHUNK, 0, 40], [4, 0, 0, 0, 0, 1]),
    "a width of a chunk that is elsewhere": coded([3000, 0, 0, CHUNK, 0, 40], [4, 1, 0, 0, 0, 1]),
    "too few": coded([3000, 0, 0, CHUNK, 0], [4, 0, 0, 0, 0]),
    "fewer widths": coded([3000, 0, 0, CHUNK, 0, 40], [4, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("bad", WRONG_CODINGS.values(), ids=WRONG_CODINGS.keys())
def test_a_coding_that_cannot_be_is_not_written(bad: PackIndex) -> None:
    with pytest.raises(FormatError):
        pack_index(bad)


def test_a_coding_that_cannot_be_is_not_read() -> None:
    """A complete index with right checksums, in which chunk 0 takes more bytes than it has."""
    good = pack_index(CODED)
    at = good.rindex(struct.pack("<I", 3000))
    body = good[:at] + struct.pack("<I", CHUNK + 1) + good[at + 4 : -FOOTER.size]
    stored = CODED.stored_bytes - 3000 + CHUNK + 1
    footer = struct.pack("<QQI", len(good), stored, crc32c(body))
    bad = body + footer + struct.pack("<I8s", crc32c(footer), b"HFPKEND1")
    with pytest.raises(CorruptionError, match="a chunk of 4096 bytes with width 4"):
        unpack_index(bad, stored + len(bad))


def test_a_pack_can_contain_the_whole_shard() -> None:
    alone = unshared_index(TRAILER)
    assert (alone.earlier(), alone.base, alone.sources) == ({}, None, ())
    assert alone.payload_bytes_here == TRAILER.record.header.payload_bytes


def test_an_index_comes_back() -> None:
    data = pack_index(index())
    assert index_bytes_of(data[-FOOTER.size :]) == len(data)
    found = unpack_index(data, 2 * CHUNK + 100 + len(data))
    assert found == index()
    assert found.trailer == TRAILER
    assert found.earlier() == {checkpoint(10): 2 * CHUNK}


def plain(chunks: range) -> int:
    return len(chunks) * CHUNK


def test_runs_name_the_offset_of_each_chunk() -> None:
    runs = list(index().runs())
    assert runs == [
        ChunkRun(range(1), HERE, 0),
        ChunkRun(range(1, 3), 1, CHUNK),
        ChunkRun(range(3, 4), HERE, CHUNK),
        ChunkRun(range(4, 5), 2, 2 * CHUNK),
        ChunkRun(range(5, 6), HERE, 2 * CHUNK),
    ]
    assert list(runs_within(runs, range(2, 5), plain)) == [
        ChunkRun(range(2, 3), 1, CHUNK),
        ChunkRun(range(3, 4), HERE, CHUNK),
        ChunkRun(range(4, 5), 2, 2 * CHUNK),
    ]
    long = [ChunkRun(range(8), HERE, 50)]
    assert list(runs_within(long, range(3, 5), plain)) == [
        ChunkRun(range(3, 5), HERE, 50 + 3 * CHUNK)
    ]


@pytest.mark.parametrize("whole", [index(), CODED], ids=["as they are", "compressed"])
@given(st.data())
def test_no_flipped_bit_and_no_cut_is_believed(whole: PackIndex, data: st.DataObject) -> None:
    good = pack_index(whole)
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptionError):
        unpack_index(bytes(bad), whole.stored_bytes + len(good))
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(CorruptionError):
        unpack_index(good[cut + 1 :], whole.stored_bytes + len(good))


def test_a_pack_of_another_length_is_refused() -> None:
    good = pack_index(index())
    with pytest.raises(CorruptionError, match="footer says"):
        unpack_index(good, 2 * CHUNK + 101 + len(good))


REFUSED = {
    "a place without a source": index(places=(0, 1, 1, 0, 3, 0)),
    "too few places": index(places=(0, 1)),
    "a source twice": index(sources=(ref(10, 1), ref(10, 1))),
    "sources out of order": index(sources=(ref(20, 0), ref(10, 1))),
    "the pack itself": index(sources=(ref(10, 1), ref(20, 1))),
    "another job": index(sources=(ref(10, 1), ref(20, 0, job_uid=JobUid("other")))),
    "earlier ones without a base": index(base=None),
    "itself as the base": index(base=checkpoint(20)),
    "too many earlier ones": index(sources=tuple(ref(s, 1) for s in range(1, MAX_EARLIER + 2))),
    "a digest that is not the table's": dataclasses.replace(
        index(), blake3=trailer_of(b"x", step=1, rank=0).record.blake3
    ),
}


@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED.keys())
def test_what_contradicts_itself_is_not_written(bad: PackIndex) -> None:
    with pytest.raises(FormatError):
        pack_index(bad)
