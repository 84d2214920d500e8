"""The pack's index: what it says comes back, and nothing that is damaged is believed."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.pack import (
    HERE,
    MAX_EARLIER,
    PackIndex,
    Run,
    index_bytes_of,
    pack_index,
    runs_within,
    unpack_index,
)
from holdfast_core.format.shard import FOOTER
from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, ShardRef, Step
from holdfast_core.testing.builders import JOB_UID, payload
from holdfast_core.testing.packs import trailer_of

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


def test_an_index_comes_back() -> None:
    data = pack_index(index())
    assert index_bytes_of(data[-FOOTER.size :]) == len(data)
    found = unpack_index(data, 2 * CHUNK + 100 + len(data))
    assert found == index()
    assert found.trailer == TRAILER
    assert found.earlier() == {checkpoint(10): 2 * CHUNK}


def test_runs_say_where_each_chunk_begins() -> None:
    runs = list(index().runs())
    assert runs == [
        Run(range(1), HERE, 0),
        Run(range(1, 3), 1, CHUNK),
        Run(range(3, 4), HERE, CHUNK),
        Run(range(4, 5), 2, 2 * CHUNK),
        Run(range(5, 6), HERE, 2 * CHUNK),
    ]
    assert list(runs_within(runs, range(2, 5), CHUNK)) == [
        Run(range(2, 3), 1, CHUNK),
        Run(range(3, 4), HERE, CHUNK),
        Run(range(4, 5), 2, 2 * CHUNK),
    ]
    long = [Run(range(8), HERE, 50)]
    assert list(runs_within(long, range(3, 5), CHUNK)) == [Run(range(3, 5), HERE, 50 + 3 * CHUNK)]


@given(st.data())
def test_no_flipped_bit_and_no_cut_is_believed(data: st.DataObject) -> None:
    good = pack_index(index())
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptionError):
        unpack_index(bytes(bad), 2 * CHUNK + 100 + len(good))
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(CorruptionError):
        unpack_index(good[cut + 1 :], 2 * CHUNK + 100 + len(good))


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
